"""Tenstorrent's inference API."""
