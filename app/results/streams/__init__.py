"""Live text of results: hub, readers and stream tickets."""
