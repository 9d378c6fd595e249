"""Text of running results in notifications, for readers in other processes that have the text before it.

The statement that stores text sends it. A reader that lacks earlier text, or missed a notification,
reads the table, which has all that was sent.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple
from uuid import UUID

import orjson

from app.core.listener import APPENDED, LIVE_TEXT, join_ids

_MAX_BYTES = 7_990  # PostgreSQL refuses payloads of 8,000
_MAX_CHARACTERS = 1_000  # which surely fit: JSON has at most six bytes for one

Notification = tuple[str, str]  # channel and payload


class LiveText(NamedTuple):
    """New text of a running attempt. `offset`: code points of its output before this text."""

    result_id: UUID
    attempt: int
    offset: int
    completion_tokens: int | None
    text: str


def channel_of(reader: str) -> str:
    """Return the channel on which a process gets the text that it reads; others are not woken."""
    return LIVE_TEXT + reader


def text_notifications(texts: Iterable[tuple[LiveText, Iterable[str]]]) -> list[Notification]:
    """Return the notifications of texts that `fits`, each for the processes that read it."""
    entries: dict[str, list[bytes]] = {}
    for text, readers in texts:
        entry = _to_entry(text)
        for reader in readers:
            entries.setdefault(reader, []).append(entry)
    return [
        (channel_of(reader), payload)
        for reader, own in entries.items()
        for payload in _to_payloads(own)
    ]


def stored_notifications(ids: Iterable[UUID]) -> list[Notification]:
    """Return the notifications that have all readers of these results read the table."""
    return [(APPENDED, payload) for payload in join_ids(list(ids))]


def from_payload(payload: str) -> Iterator[LiveText]:
    for digits, *members in orjson.loads(payload):
        yield LiveText(UUID(hex=digits), *members)


def fits(text: LiveText) -> bool:
    return len(text.text) <= _MAX_CHARACTERS or len(_to_entry(text)) <= _MAX_BYTES


def _to_entry(text: LiveText) -> bytes:
    return orjson.dumps((text.result_id.hex, *text[1:]))


def _to_payloads(entries: Iterable[bytes]) -> Iterator[str]:
    """Join entries to JSON lists, in as few notifications as possible."""
    payload, size = list[bytes](), 0
    for entry in entries:
        if size + len(entry) > _MAX_BYTES:
            yield _to_list(payload)
            payload, size = [], 0
        payload.append(entry)
        size += len(entry) + 1
    if payload:
        yield _to_list(payload)


def _to_list(entries: Iterable[bytes]) -> str:
    return f"[{b','.join(entries).decode()}]"
