"""A state machine that takes each step in the real queue and in its model, then compares both."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from uuid import UUID

import pytest
from hypothesis import note
from hypothesis.stateful import RuleBasedStateMachine, invariant

from app.core.database import is_transient
from app.core.listener import ENDED
from app.core.settings import Settings
from app.queue import suspects
from app.queue.claim import Claim, owned_results
from app.queue.enqueue import NewResult
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.queue.job_queue import JobQueue
from app.queue.live_text import stored_notifications
from app.queue.team_limits import TeamLimits
from tests.claims import claim_all
from tests.conftest import connect
from tests.integration.queue.model_worker import Attempt, Dispatcher
from tests.integration.queue.queue_model import QueueModel
from tests.integration.queue.queue_tables import (
    HALF_UNIT,
    CutMoment,
    CuttableDatabase,
    Tables,
    expected,
    expected_others,
    to_grid,
)
from tests.integration.queue.result_model import ANY_FAULT, PAUSE_SECONDS, Modelled
from tests.machines import check_machine

T = TypeVar("T")
UNIT = 2.0 * HALF_UNIT
LEASE_SECONDS = UNIT + HALF_UNIT
_RETRY_SECONDS = 20.0
_LATER_HOST = 1 << 64


@dataclass(slots=True, frozen=True)
class Bench:
    """The database that all examples of a test share."""

    loop: asyncio.AbstractEventLoop
    database: CuttableDatabase
    tables: Tables
    settings: Settings


def run_machine(machine: type["QueueMachine"], settings: Settings, examples: int) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        asyncio.Runner() as runner,
        _bench(runner.get_loop(), settings) as bench,
    ):
        for bound in ("LEAST_PAUSE_SECONDS", "MOST_PAUSE_SECONDS"):
            patch.setattr(suspects, bound, PAUSE_SECONDS)
        check_machine(lambda: machine(bench), examples=examples, steps=50)


@contextlib.contextmanager
def _bench(loop: asyncio.AbstractEventLoop, settings: Settings) -> Iterator[Bench]:
    async def open_(stack: contextlib.AsyncExitStack) -> Bench:
        connection = await connect(settings)
        stack.push_async_callback(connection.close)
        database = CuttableDatabase(settings, "test")
        database.tables = Tables(connection)
        await stack.enter_async_context(database)
        await database.tables.listen()
        return Bench(loop, database, database.tables, settings)

    stack = contextlib.AsyncExitStack()
    try:
        yield loop.run_until_complete(open_(stack))
    finally:
        loop.run_until_complete(stack.aclose())


def compare(real: Mapping[str, object], modelled: Mapping[str, object]) -> None:
    differences = {
        name: f"{real[name]!r}, modelled {value!r}"
        for name, value in modelled.items()
        if real[name] != value
    }
    assert not differences, f"{modelled.get('id', '')} {differences}"


class QueueMachine(RuleBasedStateMachine):
    """The steps that the machines have in common, and the comparison after each of them."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench
        self.ids = 0
        self.attempts: list[Attempt] = []  # that are not ended
        self.over: list[Attempt] = []
        self.ended: set[UUID] = set()  # results that notified their end
        self.run(bench.tables.reset())
        self.begin(QueueModel(max_attempts=3))

    def begin(self, model: QueueModel, **changes: object) -> None:
        """Go on with the settings of the model, and others."""
        self.model = model
        values = {
            "max_attempts": model.max_attempts,
            "continue_lost_attempts": model.continues,
            "continue_by_text": model.by_text,
        }
        settings = self.bench.settings.model_copy(update=values | changes)
        self.limits = TeamLimits(self.bench.database, settings)
        self.queue = JobQueue(self.bench.database, settings, self.limits)

    def run(self, step: Coroutine[Any, Any, T], cut: CutMoment | None = None, at: int = 0) -> T:
        """Take a step of the real queue, on connections of which the one `at` may be cut."""
        self.bench.database.cut = cut and (at, cut)
        try:
            return self.bench.loop.run_until_complete(step)
        finally:
            self.bench.database.cut = None

    def new_id(self, *, is_late: bool = False) -> UUID:
        """Return an id above all others; `is_late`: of a host whose clock is behind."""
        self.ids += 1
        return UUID(int=self.ids if is_late else _LATER_HOST + self.ids)

    # --- the comparison -------------------------------------------------------------------------

    @invariant()
    def tables_are_as_modelled(self) -> None:
        model, tables = self.model, self.bench.tables
        real = {row["id"]: row for row in self.run(tables.results())}
        assert real.keys() == model.results.keys()
        for result_id, one in model.results.items():
            compare(real[result_id], expected(one, model.now))
        compare(self.run(tables.others()), expected_others(model))
        self.notifications_are_as_modelled()

    def notifications_are_as_modelled(self) -> None:
        received, due = self.bench.tables.take_events(), self.model.events
        assert set(received) == due, f"notified {received}, modelled {due}"
        due.clear()
        ended = [UUID(hex=name) for channel, name in received if channel == ENDED]
        assert len({*ended, *self.ended}) == len(ended) + len(self.ended), "ended twice"
        self.ended.update(ended)

    # --- steps ----------------------------------------------------------------------------------

    def start_a_worker(self) -> None:
        worker = self.new_id()
        self.run(self.bench.tables.register(worker, LEASE_SECONDS))
        self.model.start_worker(worker, LEASE_SECONDS)

    def jump(self, units: int) -> None:
        self.run(self.bench.tables.jump(units * UNIT))
        self.model.now += units * UNIT

    def send(
        self,
        results: Sequence[NewResult],
        dispatcher: Dispatcher | None = None,
        cut: CutMoment | None = None,
    ) -> None:
        self.queue.dispatcher = dispatcher
        stored = self.run(self.queue.enqueue(results), cut)
        worker, room = (dispatcher.worker_id, dispatcher.room) if dispatcher else (None, 0)
        started = self.model.enqueue(results, worker, room)
        assert stored == [one.id in self.model.results for one in results]
        if dispatcher is not None:
            assert not dispatcher.begun
            # If the first answer is lost, nothing is known to be this worker's.
            known = [] if cut == "after" else started
            self.take_claims(dispatcher.worker_id, dispatcher.started, known)

    def claim(self, worker: UUID, free: Mapping[str, int], cut: CutMoment | None = None) -> None:
        """Claim; if the connection is lost after the commit, no attempt begins."""
        claims: list[Claim] | None = None
        try:
            claims = self.run(claim_all(self.queue, worker, free), cut)
        except Exception as error:
            if cut is None or not is_transient(error):
                raise
        if claims is None and cut == "before":
            return
        claimed = []
        for model, count in free.items():
            claimed += self.model.claim(worker, model, count, self.running_limits(model))
        if claims is not None:
            self.take_claims(worker, claims, claimed)

    def running_limits(self, _model: str) -> Mapping[str, int] | None:
        return None

    def claim_suspects(self, worker: UUID, models: Sequence[str]) -> None:
        claims = self.run(self.queue.claim_suspects(worker, models))
        self.take_claims(worker, claims, self.model.claim_suspects(worker, models))

    def take_claims(
        self, worker: UUID, claims: Sequence[Claim], claimed: Sequence[Modelled]
    ) -> None:
        """Compare claims with the model's, and begin their attempts."""
        assert {one.id for one in claims} == {one.sent.id for one in claimed}
        for claim in sorted(claims, key=lambda one: one.id):
            one = self.model.results[claim.id]
            note(f"{claim.id} runs, attempt {claim.attempt} on {worker}")
            assert (claim.attempt, worker) == (one.attempt, one.worker)
            assert claim.is_suspect == one.is_suspect
            assert to_grid(claim.seconds_left) == to_grid(one.deadline - self.model.now)
            assert claim.resumable == (one.sent.resumable and self.model.continues)
            resume = claim.resume
            if resume is not None and resume.fault is not None:
                resume = replace(resume, fault=ANY_FAULT)
            assert resume == one.resume(continues=self.model.continues)
            self.attempts.append(Attempt(claim, worker))

    def store_text(
        self, attempts: Sequence[Attempt], cut: CutMoment | None = None, *, watched: bool = False
    ) -> None:
        """Store the new text of attempts of one worker."""
        chunks = [chunk for attempt in attempts for chunk in attempt.take_chunks()]
        ids = [attempt.claim.id for attempt in attempts] if watched else []
        news = stored_notifications(ids)
        self.run(self.queue.append(attempts[0].worker, chunks, news), cut)
        self.model.append(attempts[0].worker, chunks, ids)

    def end(
        self,
        attempts: Sequence[Attempt],
        outcome: AttemptOutcome,
        cut: CutMoment | None = None,
        *,
        starts_over: bool = False,
        pauses: bool = False,
    ) -> None:
        """End attempts of one worker; `starts_over`: those that were to continue a text."""
        ends = []
        for attempt in attempts:
            end = attempt.end(outcome, by_text=self.model.by_text, starts_over=starts_over)
            end = replace(end, retry_after_seconds=end.retry_after_seconds * pauses)
            if end.keeps_text:
                self.store_text([attempt])
            ends.append(end)
        self.write_ends(attempts[0].worker, ends, cut)
        self.attempts = [one for one in self.attempts if one not in attempts]
        self.over += attempts

    def beside(self, attempt: Attempt) -> Sequence[Attempt]:
        """Return attempts of the same worker, one of each other result."""
        by_result = {one.claim.id: one for one in self.attempts if one.worker == attempt.worker}
        return [one for key, one in by_result.items() if key != attempt.claim.id]

    def write_ends(
        self, worker: UUID, ends: Sequence[AttemptEnd], cut: CutMoment | None = None
    ) -> None:
        batcher = self.queue.end_batcher(worker, _RETRY_SECONDS)

        async def submit() -> Sequence[bool]:
            return await batcher.submit_all(ends)

        answers = self.run(submit(), cut)
        assert answers == self.model.end(worker, ends, resent=cut is not None)

    def hand_back(self, worker: UUID) -> None:
        """Return the results of a worker that do not run there, as its heartbeat does."""
        owned = self.run(self._owned(worker))
        mine = [one for one in self.model.results.values() if one.is_running]
        assert owned == {
            one.sent.id: (one.attempt, one.is_cancelled) for one in mine if one.worker == worker
        }
        known = {(one.claim.id, one.claim.attempt) for one in self.attempts}
        ends = [
            AttemptEnd(result_id, attempt, AttemptOutcome.RETURNED, keeps_text=True)
            for result_id, (attempt, _) in owned.items()
            if (result_id, attempt) not in known
        ]
        if ends:
            self.write_ends(worker, ends)

    async def _owned(self, worker: UUID) -> dict[UUID, tuple[int, bool]]:
        async with self.bench.database.connection() as connection:
            return await owned_results(connection, worker)
