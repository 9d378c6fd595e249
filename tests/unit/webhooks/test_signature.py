"""Signatures and message ids against the public receiver of Standard Webhooks."""

import base64
from typing import Any
from uuid import UUID

import orjson
import pytest
from hypothesis import given, strategies as st
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from app.webhooks.delivery import SCHEDULE, message_id
from app.webhooks.sender import new_secret, sign

RESULT = UUID("01890000-0000-7000-8000-0000000000ab")


def verify(secret: str, body: bytes, headers: dict[str, str]) -> Any:
    return Webhook(secret).verify(body, headers)


def test_secrets_are_standard_and_never_the_same() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    for secret in secrets:
        assert secret.startswith("whsec_")
        assert len(base64.b64decode(secret.removeprefix("whsec_"), validate=True)) == 32


@given(
    data=st.dictionaries(
        st.text(st.characters(codec="utf-8")), st.text(st.characters(codec="utf-8"))
    )
)
def test_the_public_package_accepts_what_is_signed(data: dict[str, str]) -> None:
    secret, body = new_secret(), orjson.dumps(data)
    assert verify(secret, body, sign([secret], "msg_1", body)) == data


def test_it_accepts_either_secret_of_a_rotation_and_no_other() -> None:
    new, old, other = new_secret(), new_secret(), new_secret()
    headers = sign([new, old], "msg_1", b"{}")
    assert len(headers["webhook-signature"].split(" ")) == 2
    verify(new, b"{}", headers)
    verify(old, b"{}", headers)
    with pytest.raises(WebhookVerificationError):
        verify(other, b"{}", headers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("webhook-id", "msg_2"),
        ("webhook-timestamp", "1700000000"),
        ("webhook-signature", "v1,AAAA"),
    ],
)
def test_it_refuses_what_was_changed(name: str, value: str) -> None:
    secret = new_secret()
    headers = sign([secret], "msg_1", b"{}")
    with pytest.raises(WebhookVerificationError):
        verify(secret, b"{}", headers | {name: value})
    with pytest.raises(WebhookVerificationError):
        verify(secret, b"{} ", headers)


def test_the_message_id_is_the_results() -> None:
    assert message_id(RESULT) == "msg_018900000000700080000000000000ab"


def test_the_schedule_is_over_hours_and_grows() -> None:
    assert list(SCHEDULE) == sorted(SCHEDULE)
    assert len(SCHEDULE) == 9  # and the first call
    assert sum(SCHEDULE) > 24 * 3600
