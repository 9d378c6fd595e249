"""The text form of API keys.

`llm_` + 12 hexadecimal digits (the public prefix) + `_` + 256 random bits. The database stores only
the SHA-256 of the whole: random bits need no salt and no slow hash.
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
    """A key's text, which is shown once, and its stored parts."""

    text: str = field(repr=False)
    prefix: str
    hash: bytes = field(repr=False)


def new_key() -> NewKey:
    prefix = f"{_START}{secrets.token_hex(_NAME_BYTES)}"
    text = f"{prefix}_{secrets.token_urlsafe(_SECRET_BYTES)}"
    return NewKey(text, prefix, hash_of(text))


def is_api_key(token: str) -> bool:
    """Distinguish API keys from JWTs, which never begin like one."""
    return token.startswith(_START)


def prefix_of(text: str) -> str | None:
    """The public prefix of a key; None if the text is not a key."""
    match = _KEY.fullmatch(text)
    return match[1] if match else None


def is_prefix(text: str) -> bool:
    return re.fullmatch(_PREFIX, text) is not None


def hash_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def is_same(given: bytes, stored: bytes) -> bool:
    return hmac.compare_digest(given, stored)
