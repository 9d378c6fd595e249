"""Results: submission, reading, streams, search, statistics and retention."""
