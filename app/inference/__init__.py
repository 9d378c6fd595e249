"""Inference servers: Triton, models, prompts and output formats."""
