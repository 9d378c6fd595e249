"""Retention: deletion and erasure of old results."""
