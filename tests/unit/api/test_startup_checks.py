"""When the API may start: authentication, addresses, secrets."""

import base64
import json
import random
from pathlib import Path

import pytest
from pydantic import ValidationError

from app.api.startup_checks import check_startup, secret_weakness
from app.core.addresses import is_loopback
from app.core.settings import Settings
from tests.unit.core.test_settings import REQUIRED

STRONG = base64.b64encode(bytes(range(32))).decode()
OPEN = "0.0.0.0"  # noqa: S104
WEAK = [
    "x", "secret", "changeme", "your-secret-key", "replace-me", "a" * 64, "12" * 32, "0123456789" * 3,
    "your-256-bit-secret-your-256-bit-secret", "ChangeThisToSomethingLongEnough1234",
    "replace_me_with_a_long_random_string_please", "my-long-and-well-known-default-key-123",
    "YourSecretYourSecretYourSecret123456", "test-secret-456-test-secret-456-test", "supersecretsupersecretsupersecret12", " " * 40,
]  # fmt: skip


def settings(**changes: str) -> Settings:
    return Settings.model_validate(REQUIRED | changes)


@pytest.mark.parametrize("secret", WEAK)
def test_weak_secrets(secret: str) -> None:
    assert secret_weakness(secret)


def test_random_secrets_are_not_weak() -> None:
    # Always the same ones: about one random secret of 5,000,000 contains a placeholder.
    source = random.Random(32)  # noqa: S311
    for _ in range(1000):
        assert secret_weakness(source.randbytes(32).hex()) is None
        assert secret_weakness(base64.b64encode(source.randbytes(32)).decode()) is None


def test_a_random_secret_may_begin_with_a_short_word() -> None:
    for word in ("toDo", "test", "Your"):
        assert secret_weakness(word + STRONG[4:]) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.1.2.3"])
def test_loopback_starts_without_authentication_and_warns(host: str) -> None:
    found = check_startup(settings(LLM_HOST=host))
    assert is_loopback(host)
    assert found.refusal is None
    assert found.notes == ["authentication is off: bound to loopback only"]


@pytest.mark.parametrize("host", [OPEN, "::", "10.0.0.1", "example.org", "", "128.0.0.1"])
def test_elsewhere_it_does_not(host: str) -> None:
    assert not is_loopback(host)
    for changes in ({}, {"LLM_AUTH": "off", "JWT_SECRET": STRONG}, {"JWT_SECRET": ""}):
        refusal = check_startup(settings(LLM_HOST=host, **changes)).refusal
        assert refusal is not None
        assert "LLM_ALLOW_UNAUTHENTICATED" in refusal


def test_unless_that_is_declared() -> None:
    found = check_startup(settings(LLM_HOST=OPEN, LLM_ALLOW_UNAUTHENTICATED="true"))
    assert found.refusal is None
    assert "every client" in found.warnings[0]


@pytest.mark.parametrize("changes", [{"JWT_SECRET": STRONG}, {"LLM_AUTH": "on"}])
def test_with_authentication_every_address_starts(changes: dict[str, str]) -> None:
    found = check_startup(settings(LLM_HOST=OPEN, **changes))
    assert (found.refusal, found.warnings) == (None, [])
    assert "authentication is on" in found.notes[0]


@pytest.mark.parametrize("secret", WEAK)
def test_a_weak_secret_is_refused_elsewhere_and_warned_of_on_loopback(secret: str) -> None:
    refusal = check_startup(settings(LLM_HOST=OPEN, JWT_SECRET=secret)).refusal
    assert refusal is not None
    assert "JWT_SECRET" in refusal
    # Not even when the operator declared that no other machine can reach the port.
    assert check_startup(
        settings(LLM_HOST=OPEN, JWT_SECRET=secret, LLM_ALLOW_UNAUTHENTICATED="true")
    ).refusal
    here = check_startup(settings(JWT_SECRET=secret))
    assert here.refusal is None
    assert "JWT_SECRET" in here.warnings[0]
    if len(secret) > 12:
        assert secret not in refusal + here.warnings[0]


def test_tokens_that_are_never_checked_cause_a_warning() -> None:
    assert "LLM_AUTH=off" in check_startup(settings(LLM_AUTH="off", JWT_SECRET=STRONG)).warnings[0]


def test_a_key_set_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    place = {"LLM_JWT_ISSUER": "i", "LLM_JWT_AUDIENCE": "a"}
    for text in (None, "", "{", "[]", '{"keys": []}', json.dumps({"keys": [{"kty": "oct"}]})):
        file = tmp_path / "keys.json"
        if text is not None:
            file.write_text(text)
        refusal = check_startup(settings(LLM_JWKS=str(file), **place)).refusal
        assert refusal is not None
        assert "LLM_JWKS" in refusal


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"LLM_JWKS": "/keys.json"}, "LLM_JWT_ISSUER"),
        ({"LLM_JWKS": "/keys.json", "LLM_JWT_ISSUER": "i"}, "LLM_JWT_AUDIENCE"),
        ({"LLM_JWKS": "http://i/k", "LLM_JWT_ISSUER": "i", "LLM_JWT_AUDIENCE": "a"}, "https"),
        ({"LLM_JWKS": "ftp://i/k", "LLM_JWT_ISSUER": "i", "LLM_JWT_AUDIENCE": "a"}, "https"),
        ({"LLM_AUTH": "maybe"}, "LLM_AUTH"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, str], named: str) -> None:
    with pytest.raises(ValidationError, match=named) as raised:
        settings(JWT_SECRET=STRONG, **changes)
    assert STRONG not in str(raised.value)


def test_the_secret_is_not_shown() -> None:
    assert STRONG not in repr(settings(JWT_SECRET=STRONG))


def test_hosts_are_checked_while_anybody_may_come_or_when_they_are_named() -> None:
    assert settings().hosts_to_check == ["localhost", "127.0.0.1", "[::1]"]
    assert settings(LLM_AUTH="on").hosts_to_check is None
    assert settings(LLM_AUTH="on", LLM_ALLOWED_HOSTS="a").hosts_to_check == ["a"]
