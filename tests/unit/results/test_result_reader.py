"""Reading an attempt that runs in this process, from its memory."""

from collections.abc import Callable
from typing import cast

import pytest

from app.core.byte_budget import ACCOUNT, Account, ByteBudget, charge
from app.core.database import Database
from app.core.errors import MemoryBusyError
from app.core.ids import new_id
from app.core.listener import APPENDED, ENDED, WATCHED, Listener
from app.core.settings import Settings
from app.inference.triton_messages import Delta
from app.queue.claim import Claim
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import Position, ResultReader, TextDelta
from app.worker.backends.triton_backend import Generation, TritonBackend
from tests.result_rows import result_row

SETTINGS = Settings.model_construct(max_streams=10, max_waiters=10)
CHUNK = 8192  # characters of an event


def new_hub() -> StreamHub:
    return StreamHub(cast(Database, None), cast(ResultStore, None), SETTINGS)


async def test_only_the_last_of_several_events_counts_tokens() -> None:
    """The count is that of all text so far: an event before the last one has less of it."""
    hub = new_hub()
    claim = Claim(new_id(), 1, "m", "p", {}, 60.0, is_suspect=False)
    attempt = Generation(claim, cast(TritonBackend, None), hub.on_text)
    hub.attach(attempt)
    text = "x" * (2 * CHUNK + 1)
    attempt._on_delta(Delta(text, None, 1, 700, None, None))
    reader = ResultReader(hub, cast(ResultStore, None), "default", claim.id, Position(), 60.0)
    counts = []
    events = reader.events()
    async for event in events:
        if isinstance(event, TextDelta):
            counts.append(event.completion_tokens)
            if event.position.offset == len(text):
                break
    await events.aclose()
    assert counts == [None, None, 700]


async def test_a_text_whose_log_probabilities_have_no_room_holds_no_memory() -> None:
    """The reader tries again later, and is charged again."""
    ACCOUNT.set(account := Account(ByteBudget(100_000), "default"))
    before = await charge(10_000)  # for an earlier text of the request: a quarter of the budget
    row = result_row(logprobs=f"[{' ' * 10_000}]")
    amount = await charge(row.output_size)
    assert account.held == before + amount == 50_000  # as much as one request may hold
    reader = ResultReader(
        *(new_hub(), cast(ResultStore, None), row.team_id, row.id, Position(), 60.0),
        with_tokens=True,
    )
    with pytest.raises(MemoryBusyError):
        await reader._from_row(row, amount)
    assert account.held == before


class Subscriptions:
    """A listener whose notifications the test sends."""

    def __init__(self) -> None:
        self.callbacks: dict[str, Callable[[str], None]] = {}

    def subscribe(self, channel: str, callback: Callable[[str], None]) -> None:
        self.callbacks[channel] = callback


def test_a_reconnection_wakes_all_readers_and_waiters() -> None:
    """Notifications of more text, and of ends, may be lost."""
    hub, listener = new_hub(), Subscriptions()
    hub.subscribe(cast(Listener, listener))
    with hub.reading("red", new_id()) as reader, hub.expecting("red", new_id()) as waiter:
        listener.callbacks[APPENDED]("")
        assert (reader.is_set(), waiter.is_set()) == (True, False)
        listener.callbacks[ENDED]("")
        assert waiter.is_set()
        listener.callbacks[WATCHED]("")
        assert hub._to_announce
