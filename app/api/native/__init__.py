"""The native API: contexts, results, streams, models and webhooks."""
