"""Administration: Triton servers and launches."""
