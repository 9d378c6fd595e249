"""Jobs: rows, counts, order of ends, cancellation, retry and removal."""
