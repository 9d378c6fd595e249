"""Signatures of webhooks: changed, old and foreign messages are refused."""

import base64
import time
from collections.abc import Callable
from datetime import datetime, timezone

import pytest
from standardwebhooks import Webhook

from llm_api_client import WebhookSignatureError, verify_webhook


def encoded(key: bytes) -> str:
    return "whsec_" + base64.b64encode(key).decode()


OURS, OTHER = encoded(b"k" * 32), encoded(b"o" * 32)
BODY = (
    b'{"type": "result.completed", "timestamp": "2026-11-20T21:16:17+00:00",'
    b' "data": {"id": "r", "state": "completed", "model_name": "m", "result": "text"}}'
)


def signed(body: bytes = BODY, secret: str = OURS, at: float | None = None) -> dict[str, str]:
    """Headers of a message, signed by the library of the specification."""
    moment = datetime.fromtimestamp(int(time.time() if at is None else at), timezone.utc)
    return {
        "Webhook-Id": "msg_1",
        "Webhook-Timestamp": str(int(moment.timestamp())),
        "Webhook-Signature": "v1,other " + Webhook(secret).sign("msg_1", moment, body.decode()),
    }


def test_a_message_of_the_service() -> None:
    event = verify_webhook(BODY, signed(), OURS)
    assert (event.id, event.type, event.data.text) == ("msg_1", "result.completed", "text")
    assert verify_webhook(BODY, signed(), [OTHER, OURS]).id == "msg_1"


@pytest.mark.parametrize(
    ("body", "headers", "secret"),
    [
        (BODY.replace(b"text", b"evil"), signed, OURS),
        (BODY, lambda: signed(secret=OTHER), OURS),
        (BODY, lambda: signed(at=time.time() - 3600), OURS),
        (BODY, lambda: signed(at=time.time() + 3600), OURS),
        (BODY, lambda: {**signed(), "Webhook-Id": "msg_2"}, OURS),
        (BODY, lambda: {**signed(), "Webhook-Timestamp": "soon"}, OURS),
        (BODY, lambda: {**signed(), "Webhook-Signature": "ä"}, OURS),
        (BODY, dict, OURS),
        (BODY, signed, []),
        (BODY, signed, "whsec_?"),
    ],
)
def test_other_messages(body: bytes, headers: Callable[[], dict[str, str]], secret: str) -> None:
    """The headers are signed when the test runs: signatures are valid for five minutes."""
    with pytest.raises(WebhookSignatureError):
        verify_webhook(body, headers(), secret)
