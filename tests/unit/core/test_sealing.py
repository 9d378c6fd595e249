"""Sealed secrets open by the same secret and purpose only."""

import secrets

import pytest

from app.core.sealing import SealError, seal, unseal

SECRET = secrets.token_hex(32)


def test_a_sealed_text_opens_by_its_secret_and_purpose() -> None:
    sealed = seal("a token", SECRET, "tests")
    assert b"a token" not in sealed
    assert unseal(sealed, SECRET, "tests") == "a token"
    assert seal("a token", SECRET, "tests") != sealed
    for secret, purpose in ((SECRET[::-1], "tests"), (SECRET, "others")):
        with pytest.raises(SealError):
            unseal(sealed, secret, purpose)


@pytest.mark.parametrize("place", [0, 20, -1])
def test_changed_bytes_are_refused(place: int) -> None:
    sealed = bytearray(seal("a token", SECRET, "tests"))
    sealed[place] ^= 1
    with pytest.raises(SealError):
        unseal(bytes(sealed), SECRET, "tests")
    with pytest.raises(SealError):
        unseal(b"", SECRET, "tests")
