"""Files and batches: storage and processing."""
