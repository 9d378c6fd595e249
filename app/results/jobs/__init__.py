"""Jobs: named sets of results with counts, an order of ends, and keys that live as long as they do."""
