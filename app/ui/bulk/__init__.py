"""Many prompts in one file: from a table to batches, and from their outputs back to a table."""
