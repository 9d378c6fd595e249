"""One call of a webhook: signed as defined by Standard Webhooks, to a checked address.

https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import asyncio
import base64
import contextlib
import hashlib
import hmac
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus

import httpx

from app.core.guarded_client import GuardedClient
from app.core.settings import Settings
from app.core.url_guard import Lookup, RefusedTargetError, webhook_rules

_SECRET_PREFIX = "whsec_"  # noqa: S105 - Standard Webhooks' mark of a secret, not one
_EXCERPT_SECONDS = 1.0
_EXCERPT_BYTES = 256
_HTTP_DATE = "%a, %d %b %Y %H:%M:%S GMT"


@dataclass(slots=True, frozen=True)
class CallOutcome:
    """The outcome of one call; `error` is None if the receiver accepted the message."""

    error: str | None
    status: int | None = None
    retry_after: float = 0.0  # seconds, as requested by a busy receiver
    is_final: bool = False  # no further call may be made


def new_secret() -> str:
    """A secret to sign with: 32 random bytes in the format of Standard Webhooks."""
    return _SECRET_PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def sign(signing_secrets: Sequence[str], message_id: str, body: bytes) -> dict[str, str]:
    timestamp = str(int(time.time()))
    content = b".".join((message_id.encode(), timestamp.encode(), body))
    return {
        "webhook-id": message_id,
        "webhook-timestamp": timestamp,
        "webhook-signature": " ".join(_signature(secret, content) for secret in signing_secrets),
        "content-type": "application/json",
    }


def _signature(secret: str, content: bytes) -> str:
    key = base64.b64decode(secret.removeprefix(_SECRET_PREFIX))
    return f"v1,{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"


class Sender:
    """Calls receivers. One a process; used inside `async with`."""

    def __init__(self, settings: Settings, lookup: Lookup = socket.getaddrinfo) -> None:
        self.timeout = settings.webhook_timeout_seconds
        rules = webhook_rules(allow_private=settings.webhook_allow_private)
        self._client = GuardedClient("webhook-dns", rules, self.timeout, lookup)

    async def __aenter__(self) -> "Sender":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def send(
        self, team_id: str, url: str, headers: dict[str, str], body: bytes
    ) -> CallOutcome:
        try:
            async with asyncio.timeout(self.timeout):
                async with self._client.call(team_id, "POST", url, headers, body) as response:
                    return await to_outcome(response)
        except TimeoutError:
            limit = f"{self.timeout:g} s (LLM_WEBHOOK_TIMEOUT_SECONDS)"
            return CallOutcome(f"no answer within {limit}")
        except RefusedTargetError as error:
            return CallOutcome(str(error), is_final=True)
        except socket.gaierror as error:
            return CallOutcome(f"the name cannot be resolved: {error.strerror}")
        except (httpx.HTTPError, httpx.InvalidURL, OSError, UnicodeError) as error:
            return CallOutcome(_printable(f"{type(error).__name__}: {error}".removesuffix(": ")))


async def to_outcome(response: httpx.Response) -> CallOutcome:
    status = response.status_code
    if response.is_success:
        return CallOutcome(None, status)
    if response.is_redirect:
        return CallOutcome(f"answered {status}: redirects are not followed", status)
    if status == HTTPStatus.GONE:
        return CallOutcome("answered 410: the receiver is gone", status, is_final=True)
    excerpt = await _excerpt(response)
    return CallOutcome(
        f"answered {status}" + (f": {excerpt}" if excerpt else ""), status, _retry_after(response)
    )


async def _excerpt(response: httpx.Response) -> str:
    """The start of a refusal's body, for the log; read within a second."""
    start = b""
    with contextlib.suppress(TimeoutError, httpx.HTTPError):
        async with asyncio.timeout(_EXCERPT_SECONDS):
            async for piece in response.aiter_raw():
                start = piece
                break
    return _printable(start.decode(errors="replace"))


def _printable(text: str) -> str:
    """The text on one line, bounded, of characters that PostgreSQL's JSON can hold."""
    line = " ".join(text.split())[:_EXCERPT_BYTES]
    return "".join(character for character in line if character.isprintable())


def _retry_after(response: httpx.Response) -> float:
    """Seconds to wait as requested by a busy receiver, from a number or a date; otherwise 0."""
    if response.status_code not in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        return 0.0
    text = response.headers.get("retry-after", "").strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        moment = datetime.strptime(text, _HTTP_DATE).replace(tzinfo=UTC)
    except ValueError:
        return 0.0
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())
