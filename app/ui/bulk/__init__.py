"""Many prompts in one file: from a table to batches, and from their answers back to a table."""
