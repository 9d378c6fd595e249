"""API keys as text."""

import hashlib
import inspect

import pytest

from app.auth import api_keys
from app.auth.api_keys import hash_of, is_api_key, is_prefix, is_same, new_key, prefix_of


def test_a_key_has_256_random_bits_and_a_part_that_may_be_shown() -> None:
    keys = [new_key() for _ in range(100)]
    for key in keys:
        assert is_api_key(key.text)
        assert prefix_of(key.text) == key.prefix
        secret = key.text.removeprefix(f"{key.prefix}_")
        assert len(secret) == 43  # 32 bytes in base64
        assert secret not in key.prefix
        assert key.hash == hash_of(key.text) == hashlib.sha256(key.text.encode()).digest()
    assert len({key.text for key in keys}) == len({key.prefix for key in keys}) == len(keys)


def test_neither_the_key_nor_its_hash_is_shown() -> None:
    key = new_key()
    assert key.prefix in repr(key)
    assert key.text not in repr(key)
    assert "hash" not in repr(key)


@pytest.mark.parametrize(
    "text",
    ["", "llm_", "llm_0123456789ab", "llm_0123456789ab_", f"llm_0123456789ab_{'x' * 42}",
     f"llm_0123456789ab_{'x' * 44}", f"llm_0123456789AB_{'x' * 43}", f"llm_0123456789ab_{'x' * 42}!",
     f"LLM_0123456789ab_{'x' * 43}", f"llm_0123456789ab_{'x' * 43}\n", f" llm_0123456789ab_{'x' * 43}"],
)  # fmt: skip
def test_what_is_no_key_has_no_prefix(text: str) -> None:
    assert prefix_of(text) is None


def test_a_prefix_is_no_more_than_the_public_part() -> None:
    key = new_key()
    assert is_prefix(key.prefix)
    for text in ("", "llm_", key.text, f"{key.prefix}\n", key.prefix[:-1], key.prefix.upper()):
        assert not is_prefix(text)


def test_hashes_are_compared_in_constant_time() -> None:
    key = new_key()
    assert is_same(hash_of(key.text), key.hash)
    assert not is_same(hash_of(new_key().text), key.hash)
    assert "hmac.compare_digest" in inspect.getsource(api_keys.is_same)
