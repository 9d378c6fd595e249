"""Triton on a rented GPU of Vast.ai; `make -C nvidia_triton help` lists the commands."""
