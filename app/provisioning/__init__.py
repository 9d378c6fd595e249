"""Launches: Triton servers that this service starts, supervises and stops, by Slurm or on this machine."""
