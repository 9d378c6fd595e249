"""Error responses: problem+json and the shape of each dialect."""
