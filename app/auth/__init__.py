"""Authentication: tokens, API keys, JWT, scopes."""
