"""Launches: Triton servers that this service starts, follows and stops, by Slurm or on this machine."""
