"""API keys as text: how one is made, taken apart, and compared with what is stored.

`llm_` + 12 hexadecimal digits that name the key, and may be shown + `_` + 256 random bits that
prove it. Only the SHA-256 of the whole is stored: of random bits it needs no salt and no delay.
"""

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field

_NAME_BYTES = 6
_SECRET_BYTES = 32
_PREFIX = r"llm_[0-9a-f]{12}"
_KEY = re.compile(rf"({_PREFIX})_[A-Za-z0-9_-]{{43}}")
_START = "llm_"


@dataclass(slots=True, frozen=True)
class NewKey:
    """A key as it is shown once, and what is stored of it."""

    text: str = field(repr=False)
    prefix: str
    hash: bytes = field(repr=False)


def new_key() -> NewKey:
    """Make a key."""
    prefix = f"{_START}{secrets.token_hex(_NAME_BYTES)}"
    text = f"{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(text, prefix, hash_of(text))


def is_api_key(token: str) -> bool:
    """Whether a bearer token means to be a key of ours: a JWT never begins so."""
    return token.startswith(_START)


def prefix_of(text: str) -> str | None:
    """The part that names the key; None for what cannot be one."""
    match = _KEY.fullmatch(text)
    return match[1] if match else None


def is_prefix(text: str) -> bool:
    """Whether a text names a key."""
    return re.fullmatch(_PREFIX, text) is not None


def hash_of(text: str) -> bytes:
    """What is stored of a key."""
    return hashlib.sha256(text.encode()).digest()


def is_same(given: bytes, stored: bytes) -> bool:
    """Whether two hashes are equal, in a time that does not tell how far they are."""
    return hmac.compare_digest(given, stored)
