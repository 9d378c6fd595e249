"""The results of one request, awaited together or read as one stream, from rows of the test."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast
from uuid import UUID

import pytest

from app.core.errors import (
    AttemptLostError,
    DatabaseUnavailableError,
    ErasedError,
    NotFoundError,
    ResultFailedError,
    StoppingError,
)
from app.core.settings import Settings
from app.results.multi_result import GroupEvent, ResultGroups
from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.result_reader import Ended, TextDelta
from tests.result_rows import result_row
from tests.unit.results.test_hub_places import TEAM, Store, hub_of
from tests.unit.worker.test_attempt import Scripted, claim_of
from tests.virtual_time import run_in_virtual_time

ERASED = datetime(2030, 1, 1, tzinfo=UTC)
FAILED: dict[str, Any] = {
    "state": "failed", "error_code": "model_error", "error_message": "x", "error_retryable": True,
}  # fmt: skip


class House:
    """A hub, its rows and the attempts that run here."""

    def __init__(self) -> None:
        self.store = Store()
        self.hub = hub_of(self.store)
        settings = Settings.model_construct(max_deadline_seconds=50.0, keep_alive_seconds=5.0)
        results = cast(ResultStore, self.store)
        self.groups = ResultGroups(settings, cast(Any, self), results, self.hub)
        self.is_away = False
        self.cancelled: list[Sequence[UUID]] = []

    async def cancel_ids(self, _team: str, ids: Sequence[UUID]) -> None:
        if self.is_away:
            raise DatabaseUnavailableError("away")
        self.cancelled.append(ids)

    async def wait(self, *rows: ResultRow, has_left: bool = False) -> list[ResultRow]:
        self.store.rows = {row.id: row for row in rows}
        with ExitStack() as stack:
            signals = [stack.enter_context(self.hub.expecting(TEAM, row.id)) for row in rows]
            return await self.groups.wait(
                *(TEAM, [row.id for row in rows], signals),
                is_new=False,
                is_disconnected=lambda: has_left,
            )

    def attempt(self, row: ResultRow, number: int = 1) -> Scripted:
        attempt = Scripted(replace(claim_of(), id=row.id, attempt=number), self.hub.on_text)
        self.hub.attach(attempt)
        return attempt

    def end(self, row: ResultRow) -> None:
        self.hub.deliver(cast(Any, row._asdict()))

    def read(self, *rows: ResultRow) -> AsyncGenerator[GroupEvent, None]:
        return self.groups.read(TEAM, [row.id for row in rows])


def test_all_results_of_a_request_are_awaited() -> None:
    async def work() -> None:
        house, done = House(), result_row()
        assert await house.wait(done, result_row()) == list(house.store.rows.values())
        for last, error in (
            (result_row(erased_at=ERASED), ErasedError),
            (result_row(**FAILED), ResultFailedError),
            (result_row(state="pending"), StoppingError),
        ):
            with pytest.raises(error):
                await house.wait(done, last)
        pending = result_row(state="pending")
        assert await house.wait(pending, has_left=True) == [pending]

    run_in_virtual_time(work())


def test_streams_of_a_request_come_as_their_texts_do() -> None:
    async def work() -> None:
        house, rows = House(), [result_row(output="ab") for _ in range(2)]
        attempts = [house.attempt(row) for row in rows]
        found: list[tuple[int, str]] = []
        async with aclosing(house.read(*rows)) as events:
            attempts[1].say("a")
            async for place, event in events:
                if isinstance(event, TextDelta):
                    found.append((place, event.text))
                elif isinstance(event, Ended):
                    found.append((place, "ended"))
                if found == [(1, "a")]:
                    attempts[0].say("ab")
                    house.end(rows[1])
                elif (1, "ended") in found:
                    house.end(rows[0])
        assert sorted(found) == [(0, "ab"), (0, "ended"), (1, "a"), (1, "b"), (1, "ended")]

    run_in_virtual_time(work())


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_one_stream_ends_the_request(count: int) -> None:
    async def work() -> None:
        for last, text, error in (
            (result_row(**FAILED), "", ResultFailedError),
            (result_row(**FAILED), "some", ResultFailedError),
            (result_row(erased_at=ERASED, output=None), "", ErasedError),
        ):
            house, others = House(), [result_row() for _ in range(count - 1)]
            for row in others:
                house.attempt(row)
            house.attempt(last).say(text)
            with pytest.raises(error):  # noqa: PT012 - the loop is the statement
                async for _, event in house.read(*others, last):
                    if isinstance(event, TextDelta) or not text:
                        house.end(last)

    run_in_virtual_time(work())


def test_a_text_that_was_read_is_never_replaced() -> None:
    """A lost attempt begins again unseen if nothing of it was read."""

    async def work() -> None:
        house, row = House(), result_row(output="new", attempt=2)
        house.attempt(row).say("old")
        events = house.read(row)
        assert isinstance((await anext(events))[1], TextDelta)
        house.attempt(row, 2).say("new")
        with pytest.raises(AttemptLostError):
            await anext(events)
        house = House()
        house.attempt(row)
        texts: list[str] = []
        async for _, event in house.read(row):
            if isinstance(event, TextDelta):
                texts.append(event.text)
                house.end(row)
            elif not isinstance(event, Ended):  # a sign of life
                house.attempt(row, 2).say("new")
        assert texts == ["new"]

    run_in_virtual_time(work())


def test_an_erased_result_whose_text_was_read_has_ended() -> None:
    async def work() -> None:
        house, row = House(), result_row(erased_at=ERASED, output=None)
        house.attempt(row).say("text")
        found: list[type[object]] = []
        async for _, event in house.read(row):
            found.append(type(event))
            house.end(row)
        assert found == [TextDelta, Ended]

    run_in_virtual_time(work())


def test_a_stream_whose_result_is_deleted_or_whose_process_stops_has_no_end() -> None:
    async def work() -> None:
        for stops, error in ((True, StoppingError), (False, NotFoundError)):
            house, row = House(), result_row()
            attempt = house.attempt(row)
            attempt.say("text")
            events = house.read(row)
            assert isinstance((await anext(events))[1], TextDelta)
            if stops:
                house.hub.close()
            else:
                house.store.rows = {}
                house.hub.detach(attempt)
                house.hub._readers.notify_end(row.id)
            with pytest.raises(error):
                await anext(events)

    run_in_virtual_time(work())


async def test_a_cancellation_without_a_database_is_given_up() -> None:
    house, row = House(), result_row()
    await house.groups.cancel(TEAM, [row.id])
    house.is_away = True
    await house.groups.cancel(TEAM, [row.id])
    assert house.cancelled == [[row.id]]
