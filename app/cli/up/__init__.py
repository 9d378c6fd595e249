"""`python -m app up`: PostgreSQL, Triton, the API and a worker as children of one process."""
