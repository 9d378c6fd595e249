"""Stored text inside notifications: readers in other processes that have the rest need not read the table.

The statement that stores the text also sends it. A reader that lacks earlier text, or has missed a
notification, reads the table, which then has all of it.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import orjson

from app.core.listener import APPENDED, LIVE_TEXT, join_ids
from app.queue.progress import Chunk

_MAX_BYTES = 7_990  # PostgreSQL refuses payloads of 8,000


@dataclass(slots=True, frozen=True)
class LiveText:
    """New text of a running attempt. `offset`: code points of its output before this text."""

    result_id: UUID
    attempt: int
    offset: int
    completion_tokens: int | None
    text: str


def channel_of(reader: str) -> str:
    """Return the channel on which a process gets the text that it reads; others are not woken."""
    return LIVE_TEXT + reader


def notifications(
    chunks: Sequence[Chunk], watched: Mapping[UUID, Collection[str]]
) -> list[tuple[str, str]]:
    """Return the (channel, payload)s for the processes that read results, by result.

    They get the text of these chunks, or the id of a result that has none here, or more than fits.
    """
    entries: dict[str, list[bytes]] = {}  # by reader
    without_text = dict.fromkeys(watched)
    for chunk in chunks:
        if (readers := watched.get(chunk.result_id)) and (entry := _to_entry(chunk)):
            del without_text[chunk.result_id]
            for reader in readers:
                entries.setdefault(reader, []).append(entry)
    sent = [
        (channel_of(reader), payload)
        for reader, texts in entries.items()
        for payload in _to_payloads(texts)
    ]
    return sent + [(APPENDED, payload) for payload in join_ids(list(without_text))]


def from_payload(payload: str) -> Iterator[LiveText]:
    for digits, *members in orjson.loads(payload):
        yield LiveText(UUID(hex=digits), *members)


def _to_entry(chunk: Chunk) -> bytes | None:
    """Return None for a text that is too long, or has log probabilities, which are read from the table."""
    if chunk.logprobs:
        return None
    members = (chunk.attempt, chunk.offset, chunk.completion_tokens, chunk.text)
    entry = orjson.dumps((chunk.result_id.hex, *members))
    return entry if len(entry) <= _MAX_BYTES else None


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
