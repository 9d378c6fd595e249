"""Text in notifications: their sizes, and the processes that get them."""

from app.core.ids import new_id
from app.core.listener import APPENDED, split_ids
from app.queue.live_text import (
    LiveText,
    channel_of,
    fits,
    from_payload,
    stored_notifications,
    text_notifications,
)

LIMIT = 8_000  # bytes, which PostgreSQL refuses


def live(text: str) -> LiveText:
    return LiveText(new_id(), 2, 7, 5, text)


def payloads(texts: list[LiveText]) -> list[str]:
    """Return the notifications for the reader of all these texts."""
    sent = text_notifications([(text, ["a"]) for text in texts])
    assert {channel for channel, _ in sent} <= {channel_of("a")}
    assert all(len(payload.encode()) < LIMIT for _, payload in sent)
    return [payload for _, payload in sent]


def test_a_text_arrives_as_it_was_sent() -> None:
    text = live('a "\U0001f642"\n\u2028')
    assert [list(from_payload(payload)) for payload in payloads([text])] == [[text]]
    assert payloads([]) == []


def test_many_texts_share_few_notifications() -> None:
    texts = [live("\U0001f642" * (index % 40)) for index in range(500)]
    sent = payloads(texts)
    assert [text for payload in sent for text in from_payload(payload)] == texts
    assert len(sent) <= sum(len(payload.encode()) for payload in sent) / LIMIT + 2


def test_a_text_that_fills_a_notification_is_sent_alone() -> None:
    """One that is longer does not fit: by its bytes, not by its characters."""
    neighbour, whole = live("y"), live("x" * (LIMIT - 100))
    assert fits(neighbour)
    assert fits(whole)
    assert len(payloads([neighbour, whole, neighbour])) == 3
    assert not fits(live("x" * (LIMIT - 10)))
    assert not fits(live("\U0001f642" * (LIMIT // 4)))
    assert fits(live("\x01" * 1_000))
    assert payloads([live("\x01" * 1_000)])


def test_each_process_gets_the_texts_that_it_reads() -> None:
    first, second, unread = live("1"), live("2"), live("3")
    sent = text_notifications([(first, ["a", "b"]), (second, ["b"]), (unread, [])])
    texts = {channel: [one.text for one in from_payload(payload)] for channel, payload in sent}
    assert texts == {channel_of("a"): ["1"], channel_of("b"): ["1", "2"]}


def test_the_ids_of_stored_texts_are_for_all_readers() -> None:
    ids = [new_id() for _ in range(500)]
    sent = stored_notifications(ids)
    assert {channel for channel, _ in sent} == {APPENDED}
    assert [one for _, payload in sent for one in split_ids(payload)] == ids
    assert stored_notifications([]) == []
