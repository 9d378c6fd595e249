"""The turns of an indexer: their pauses, and how many results each takes after errors."""

import asyncio
from typing import Any, cast

import pytest

from app.core.errors import DatabaseUnavailableError
from app.core.settings import Settings
from app.results.indexer import ResultIndexer
from tests.virtual_time import run_in_virtual_time

AWAY = DatabaseUnavailableError("away")


class Turns(ResultIndexer):
    """Each turn is an error or a pause of the test's; it keeps the times and sizes."""

    def __init__(self, *turns: float | Exception) -> None:
        settings = Settings.model_construct(history_days=1, search="words")
        super().__init__(cast(Any, self), cast(Any, None), settings)
        self.turns = list(turns)
        self.found: list[tuple[float, int]] = []
        self.began = asyncio.get_running_loop().time()

    async def step(self) -> float:
        now = asyncio.get_running_loop().time() - self.began
        self.found.append((round(now, 3), self._max_rows))
        turn = self.turns.pop(0) if self.turns else 1e6
        if isinstance(turn, Exception):
            raise turn
        return turn


def test_errors_make_turns_smaller_and_turns_grow_again() -> None:
    """A bug waits a minute, an outage a second."""

    async def work() -> list[tuple[float, int]]:
        indexer = Turns(0.5, AWAY, RuntimeError("a bug"), AWAY, AWAY, AWAY, 2.0, 1.0)
        running = asyncio.create_task(indexer.run())
        await asyncio.sleep(100)
        running.cancel()
        return indexer.found

    assert run_in_virtual_time(work()) == [
        (0, 500), (0.5, 500), (1.5, 125), (61.5, 31), (62.5, 7), (63.5, 1), (64.5, 1), (66.5, 2),
        (67.5, 4),
    ]  # fmt: skip


class Ticks:
    """A clock that goes on by a step at each look."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 100.0, step

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


class Looks(ResultIndexer):
    """One turn, of what the look finds; the names of what it did."""

    def __init__(self, *, is_due: bool, may_walk: bool, is_new_minute: bool, has: str) -> None:
        super().__init__(
            cast(Any, self),
            cast(Any, None),
            Settings.model_construct(history_days=1, search="words"),
        )
        self.look = {"is_due": is_due, "may_walk": may_walk, "is_new_minute": is_new_minute}
        self.has = has
        self.done: list[str] = []
        self.places: list[int] = []

    async def fetch(self, _sql: str, place: int) -> list[dict[str, bool]]:
        self.places.append(place)
        return [self.look]

    async def count(self) -> bool:
        self.done.append("index")
        return "index" in self.has

    async def index_older(self) -> bool:
        self.done.append("older")
        return "older" in self.has

    async def _begin_minute(self) -> None:
        self.done.append("minute")


@pytest.mark.parametrize(
    ("is_due", "may_walk", "has", "done", "pause"),
    [
        (True, True, "index", ["index"], 0.125),
        (True, True, "older", ["index", "older"], 0.625),
        (True, True, "", ["index", "older"], 1.0),
        (False, True, "index older", ["older"], 0.625),
        (True, False, "older", ["index"], 1.0),
        (False, False, "index older", [], 1.0),
    ],
)
async def test_new_results_come_before_older_ones(
    monkeypatch: pytest.MonkeyPatch,
    is_due: bool,
    may_walk: bool,
    has: str,
    done: list[str],
    pause: float,
) -> None:
    """A turn pauses as long as it took, five times as long for older results, at most a second."""
    for is_new_minute in (True, False):
        monkeypatch.setattr("app.results.indexer.time", Ticks(0.125))
        looks = Looks(is_due=is_due, may_walk=may_walk, is_new_minute=is_new_minute, has=has)
        assert await looks.step() == pause
        assert looks.done == ["minute"] * is_new_minute + done
    monkeypatch.setattr("app.results.indexer.time", Ticks(0.5))
    looks = Looks(is_due=is_due, may_walk=may_walk, is_new_minute=False, has=has)
    assert await looks.step() == (0.5 if pause == 0.125 else 1.0)


async def test_the_first_place_is_looked_at_again_every_five_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that other processes committed late stand before the last place."""
    monkeypatch.setattr("app.results.indexer.time", Ticks(2.5))
    looks = Looks(is_due=False, may_walk=False, is_new_minute=False, has="")
    for _ in range(5):
        looks._place = 7
        await looks.step()
    assert looks.places == [0, 7, 0, 7, 0]


async def test_a_minute_that_another_process_began_is_left_to_it() -> None:
    class Taken:
        """A database in which the minute is taken: it returns no row."""

        statements = 0

        async def fetch(self, _sql: str) -> list[object]:
            self.statements += 1
            return []

    taken, settings = Taken(), Settings.model_construct(history_days=1, search="words")
    await ResultIndexer(cast(Any, taken), cast(Any, None), settings)._begin_minute()
    assert taken.statements == 1
