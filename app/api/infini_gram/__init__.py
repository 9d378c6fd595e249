"""infini-gram's API."""
