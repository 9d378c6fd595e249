"""Whether the API may be bound where it is to be: authentication, and how strong its secret is.

Without authentication it binds loopback only, and says so. Elsewhere a secret that others can
guess is no authentication either.
"""

import re
from dataclasses import dataclass, field

from app.auth.jwks import KeySetError, is_url, parse_key_set, read_file
from app.auth.jwt_verifier import MIN_SECRET_BYTES
from app.core.addresses import is_loopback
from app.core.settings import Settings

# Words of the secrets in examples and templates. As whole words, or at the beginning: by chance a
# random secret has neither.
_PLACEHOLDERS = (
    "secret", "supersecret", "changeme", "change", "replace", "replaceme", "example", "placeholder",
    "password", "default", "your", "test", "insecure", "todo",
)  # fmt: skip
_NOT_WORD = re.compile(r"[^a-z0-9]+")
_MIN_DIFFERENT = 10  # characters: "aaaa..." is long, and no secret


@dataclass(slots=True)
class StartupReport:
    """What is to be told at the start; `refusal` says why there is none."""

    refusal: str | None = None
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def judge(settings: Settings) -> StartupReport:
    """Judge the settings of an API that is about to start."""
    if not settings.is_authenticated:
        return _judge_open(settings)
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
    """What is wrong with a secret that tokens are signed with; None if nothing is seen."""
    lower = secret.lower()
    if lower.startswith(_PLACEHOLDERS) or not set(_PLACEHOLDERS).isdisjoint(_NOT_WORD.split(lower)):
        return "is a placeholder"
    if len(secret.encode()) < MIN_SECRET_BYTES:
        return f"has fewer than {MIN_SECRET_BYTES} bytes"
    if len(set(secret)) < _MIN_DIFFERENT:
        return "repeats a few characters"
    return None


def _judge_open(settings: Settings) -> StartupReport:
    found = StartupReport()
    if settings.jwt_secret or settings.jwks:
        found.warnings.append("LLM_AUTH=off: no token is looked at, though JWTs are configured")
    if is_loopback(settings.host):
        found.notes.append("authentication is off: bound to loopback only")
    elif settings.allow_unauthenticated:
        found.warnings.append(
            "LLM_ALLOW_UNAUTHENTICATED is set: everyone who reaches the port may use it"
        )
    else:
        found.refusal = (
            f"LLM_HOST={settings.host} is not loopback and authentication is off: set LLM_AUTH=on "
            "(API keys), JWT_SECRET or LLM_JWKS (docs/authentication.md), bind 127.0.0.1, or set "
            "LLM_ALLOW_UNAUTHENTICATED=true where nobody else can reach the port."
        )
    return found
