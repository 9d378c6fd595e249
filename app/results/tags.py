"""Tags of results: digests by which a list finds a pair of the metadata."""

import hashlib

_BYTES = 16


def tag_of(key: str, value: str) -> bytes:
    """The digest of a key and of its value as text, as the database's `tags_of_metadata` makes it."""
    return hashlib.sha256(f"{key}\0{value}".encode()).digest()[:_BYTES]
