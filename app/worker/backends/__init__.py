"""Backends that execute an attempt: Triton and attribution."""
