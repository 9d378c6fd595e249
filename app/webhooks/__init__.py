"""Webhooks: outbox, signing and delivery."""
