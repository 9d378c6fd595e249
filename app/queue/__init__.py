"""The queue: transitions of state, idempotency, admission and limits."""
