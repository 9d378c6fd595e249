"""Secrets of the service at rest, sealed by a key that is kept elsewhere.

Fernet (https://github.com/fernet/spec) encrypts and authenticates; each purpose has a key of its own,
derived by HKDF (RFC 5869).
"""

import base64

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF


class SealError(Exception):
    """The sealed bytes were changed, or belong to another secret or purpose."""


def seal(text: str, secret: str, purpose: str) -> bytes:
    return _fernet(secret, purpose).encrypt(text.encode())


def unseal(sealed: bytes, secret: str, purpose: str) -> str:
    """The sealed text. Raises SealError."""
    try:
        return _fernet(secret, purpose).decrypt(sealed).decode()
    except InvalidToken:
        raise SealError from None


def _fernet(secret: str, purpose: str) -> Fernet:
    derivation = HKDF(SHA256(), length=32, salt=None, info=f"llm seal: {purpose}".encode())
    return Fernet(base64.urlsafe_b64encode(derivation.derive(secret.encode())))
