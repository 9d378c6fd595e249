"""HTTP API: application, shared parts, and one package per dialect."""
