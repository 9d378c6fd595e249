"""Statistics of past results and the current state."""
