"""Verification of the messages that the service sends to webhooks (Standard Webhooks)."""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Iterable, Mapping
from datetime import datetime

import msgspec

from llm_api_client.errors import WebhookSignatureError
from llm_api_client.schemas import Result

_PREFIX = "whsec_"
_TOLERANCE_SECONDS = 300


class WebhookEvent(msgspec.Struct, frozen=True):
    """A verified message; `id` is the same in each delivery of it."""

    id: str
    type: str
    data: Result
    timestamp: datetime | None = None


class _Message(msgspec.Struct):
    type: str
    data: Result
    timestamp: datetime | None = None


def verify_webhook(
    body: bytes,
    headers: Mapping[str, str],
    secret: str | Iterable[str],
    *,
    tolerance_seconds: float = _TOLERANCE_SECONDS,
) -> WebhookEvent:
    """Return the event of a message that the service signed.

    Args:
        body: the request's body, unchanged.
        headers: the request's headers, in any case.
        secret: the team's secret, from `client.webhooks.secret()`; several during a rotation.
        tolerance_seconds: most seconds between the message's time and this machine's clock.

    Raises:
        WebhookSignatureError: the message is not the service's, was changed, or is old.
    """
    lower = {name.lower(): value for name, value in headers.items()}
    try:
        message_id, timestamp = lower["webhook-id"], lower["webhook-timestamp"]
        signatures = lower["webhook-signature"].split()
        sent_at = int(timestamp)
    except (KeyError, ValueError) as error:
        raise WebhookSignatureError(
            f"The header of a signature is missing or wrong: {error}."
        ) from None
    if abs(time.time() - sent_at) > tolerance_seconds:
        raise WebhookSignatureError("The message's time is too far from this machine's clock.")
    content = b".".join((message_id.encode(), timestamp.encode(), body))
    secrets = [secret] if isinstance(secret, str) else list(secret)
    expected = [_signature(one, content) for one in secrets]
    if not any(
        hmac.compare_digest(one.encode(), given.encode())
        for one in expected
        for given in signatures
    ):
        raise WebhookSignatureError("No signature of the message is of this secret.")
    message = msgspec.json.decode(body, type=_Message)
    return WebhookEvent(message_id, message.type, message.data, message.timestamp)


def _signature(secret: str, content: bytes) -> str:
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except binascii.Error as error:
        raise WebhookSignatureError("The secret is not one of a webhook.") from error
    return f"v1,{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"
