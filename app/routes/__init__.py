"""HTTP handlers, thin: parse, call, return."""
