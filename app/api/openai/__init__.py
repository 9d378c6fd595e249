"""OpenAI's API: chat, completions, responses, files and batches."""
