"""Many prompts in one file: from a table to the rows of a job, and from their answers back to a table."""
