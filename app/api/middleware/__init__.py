"""ASGI middleware: request guard, request id, authentication."""
