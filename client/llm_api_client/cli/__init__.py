"""The command `llm-api`."""
