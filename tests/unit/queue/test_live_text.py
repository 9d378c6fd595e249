"""Text in notifications: what fits, and what its readers get otherwise."""

from uuid import UUID

from app.core.ids import new_id
from app.core.listener import APPENDED, split_ids
from app.queue.live_text import LiveText, channel_of, from_payload, notifications
from app.queue.progress import Chunk

LIMIT = 8_000  # bytes, which PostgreSQL refuses


def chunk(text: str, result_id: UUID | None = None, logprobs: tuple[bytes, ...] = ()) -> Chunk:
    return Chunk(result_id or new_id(), 2, 7, text, 3, 5, logprobs)


def sent(chunks: list[Chunk], watched: list[UUID]) -> tuple[list[LiveText], list[UUID]]:
    """Return the texts and the ids for one process that reads all of the watched results."""
    texts, ids = list[LiveText](), list[UUID]()
    for channel, payload in notifications(chunks, {one: ["a"] for one in watched}):
        assert len(payload.encode()) < LIMIT
        assert channel in (APPENDED, channel_of("a"))
        if channel == APPENDED:
            ids += split_ids(payload)
        else:
            texts += from_payload(payload)
    return texts, ids


def test_the_text_of_watched_results_is_sent() -> None:
    read, unread = chunk('a "🙂"\n'), chunk("b")
    texts, ids = sent([read, unread], [read.result_id])
    assert texts == [LiveText(read.result_id, 2, 7, 5, 'a "🙂"\n')]
    assert ids == []


def test_watched_results_without_text_to_send_are_named() -> None:
    """One that has no chunk in this write, one with log probabilities, and one with a long text."""
    silent, short = new_id(), chunk("a")
    scored, long = chunk("b", logprobs=(b"{}",)), chunk("é" * (LIMIT // 2))
    watched = [silent, scored.result_id, long.result_id, short.result_id]
    texts, ids = sent([scored, long, short], watched)
    assert [one.result_id for one in texts] == [short.result_id]
    assert ids == [silent, scored.result_id, long.result_id]


def test_many_texts_share_few_notifications() -> None:
    chunks = [chunk("🙂" * (index % 40)) for index in range(500)]
    watched = [one.result_id for one in chunks]
    texts, ids = sent(chunks, watched)
    assert [(one.result_id, one.text) for one in texts] == [
        (one.result_id, one.text) for one in chunks
    ]
    assert ids == []
    payloads = [payload for _, payload in notifications(chunks, {one: ["a"] for one in watched})]
    assert len(payloads) <= sum(len(payload.encode()) for payload in payloads) / LIMIT + 2


def test_a_text_that_fills_a_notification_is_sent_alone() -> None:
    neighbour, whole, longer = chunk("y"), chunk("x" * (LIMIT - 100)), chunk("x" * (LIMIT - 10))
    chunks = [neighbour, whole, longer]
    texts, ids = sent(chunks, [one.result_id for one in chunks])
    assert [one.text for one in texts] == ["y", whole.text]
    assert ids == [longer.result_id]


def test_each_process_gets_the_texts_that_it_reads() -> None:
    first, second = chunk("1"), chunk("2")
    watched = {first.result_id: ["a", "b"], second.result_id: ["b"], new_id(): []}
    texts = {
        channel: [text.text for text in from_payload(payload)]
        for channel, payload in notifications([first, second], watched)
        if channel != APPENDED
    }
    assert texts == {channel_of("a"): ["1"], channel_of("b"): ["1", "2"]}
