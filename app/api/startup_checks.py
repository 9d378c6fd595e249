"""Startup checks: authentication, bound address, and strength of the secret.

If authentication is off, the API binds loopback only. On other addresses a secret that can be guessed
is rejected.
"""

import re
from dataclasses import dataclass, field

from app.auth.jwks import KeySetError, is_url, parse_key_set, read_file
from app.auth.jwt_verifier import MIN_SECRET_BYTES
from app.core.addresses import is_loopback
from app.core.settings import Settings

# Words of the secrets in examples and templates: long ones at the beginning, all of them as whole words.
# One of 300,000 random secrets in base64 begins with one of three words of four letters, fewer than one
# of 10^8 with a long word.
_BEGINNINGS = (
    "secret", "supersecret", "change", "replace", "example", "placeholder", "password", "default",
    "insecure", "yoursecret", "yourkey", "testsecret", "testkey",
)  # fmt: skip
_WORDS = {*_BEGINNINGS, "changeme", "replaceme", "your", "test", "todo"}
_NOT_WORD = re.compile(r"[^a-z0-9]+")
_MIN_DIFFERENT = 10  # characters: "aaaa..." is long but not secret


@dataclass(slots=True)
class StartupReport:
    """Outcome of the checks; with a `refusal` the API does not start."""

    refusal: str | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_startup(settings: Settings) -> StartupReport:
    if not settings.is_authenticated:
        return _check_unauthenticated(settings)
    found = StartupReport(notes=["authentication is on: Authorization: Bearer, by API key or JWT"])
    if settings.jwks and not is_url(settings.jwks):
        try:
            parse_key_set(read_file(settings.jwks))
        except KeySetError as error:
            found.refusal = f"LLM_JWKS cannot be used: {error}"
    weakness = settings.jwt_secret and secret_weakness(settings.jwt_secret.get_secret_value())
    if weakness:
        text = f"JWT_SECRET {weakness}: make one with `openssl rand -base64 32`"
        if is_loopback(settings.host):
            found.warnings.append(f"{text}. Only loopback is bound, so the service starts.")
        else:
            found.refusal = f"{text}, or bind 127.0.0.1 (LLM_HOST={settings.host} is not loopback)."
    return found


def secret_weakness(secret: str) -> str | None:
    lower = secret.lower()
    if lower.startswith(_BEGINNINGS) or not _WORDS.isdisjoint(_NOT_WORD.split(lower)):
        return "is a placeholder"
    if len(secret.encode()) < MIN_SECRET_BYTES:
        return f"has fewer than {MIN_SECRET_BYTES} bytes"
    if len(set(secret)) < _MIN_DIFFERENT:
        return "repeats a few characters"
    return None


def _check_unauthenticated(settings: Settings) -> StartupReport:
    found = StartupReport()
    if settings.jwt_secret or settings.jwks:
        found.warnings.append("LLM_AUTH=off: tokens are ignored, although JWTs are configured")
    if settings.published_address and not is_loopback(settings.published_address):
        found.refusal = (
            f"Authentication is off, and a proxy is published on {settings.published_address} "
            "(PROXY_ADDRESS): set LLM_AUTH=on (API keys), JWT_SECRET or LLM_JWKS "
            "(docs/authentication.md), or publish it on 127.0.0.1."
        )
    elif is_loopback(settings.host):
        found.notes.append("authentication is off: bound to loopback only")
    elif settings.allow_unauthenticated:
        found.warnings.append(
            "LLM_ALLOW_UNAUTHENTICATED is set: every client that reaches the port may use the API"
        )
    else:
        found.refusal = (
            f"LLM_HOST={settings.host} is not loopback and authentication is off: set LLM_AUTH=on "
            "(API keys), JWT_SECRET or LLM_JWKS (docs/authentication.md), bind 127.0.0.1, or set "
            "LLM_ALLOW_UNAUTHENTICATED=true if other clients cannot reach the port."
        )
    return found
