"""Plans of the hot statements, in every state of PostgreSQL's statistics."""
