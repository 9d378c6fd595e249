"""The queue against a plain model of it, step by step, in sequences that hypothesis invents.

`FUZZ` is explained in `tests/machines.py`; more than a few times the examples need `--timeout 0`. A
failure prints its steps.

A jump of the database's clock is a shift of all moments in the tables, which is the same from their
side. Steps follow one another: races between statements have tests of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from app.core.settings import Settings
from app.queue.enqueue import NewContext, NewResult, OnDisconnect
from app.queue.finish import AttemptOutcome
from app.queue.idempotency import NewKey
from app.queue.rescue import mark_lost_workers
from tests.integration.queue.model_worker import Attempt, Dispatcher
from tests.integration.queue.queue_bench import make_result
from tests.integration.queue.queue_machine import (
    LEASE_SECONDS,
    UNIT,
    QueueMachine,
    run_machine,
)
from tests.integration.queue.queue_model import QueueModel
from tests.integration.queue.queue_tables import HALF_UNIT, CutMoment

_MAX_WHICH = 6
_WHICH = st.integers(0, _MAX_WHICH)  # counts back from the last one
_MAX_PENDING = 2
# Each costs a reconnection; the least is what examples shrink to.
_CUT: st.SearchStrategy[CutMoment | None] = st.integers(0, 24).map(
    lambda number: ("before" if number == 23 else "after") if number > 22 else None
)


Event = int | str  # int: a jump of the clock in units


@dataclass(slots=True, frozen=True)
class Sent:
    """One request, for one result or a group of two."""

    context: Literal["new", "stored", "missing"]
    model: str
    priority: int
    deadline: float  # in units; never a whole number of them
    on_disconnect: OnDisconnect
    resumable: bool
    has_key: bool
    is_late: bool
    is_group: bool
    has_webhook: bool


_SENT = st.builds(
    Sent,
    context=st.sampled_from(["new"] * 8 + ["stored", "missing"]),
    model=st.sampled_from(["m", "m", "m", "n"]),
    priority=st.sampled_from([0, 0, 0, 5]),
    deadline=st.sampled_from([5000.5, 5000.5, 2.5, 0.5]),
    on_disconnect=st.sampled_from(["continue", "continue", "continue", "cancel"]),
    resumable=st.sampled_from([True, True, False]),
    has_key=st.sampled_from([False] * 5 + [True]),
    is_late=st.sampled_from([False, False, True]),
    is_group=st.sampled_from([False, False, False, True]),
    has_webhook=st.sampled_from([False, False, True]),
)


_STEPS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "enqueue": {
        "requests": st.lists(_SENT, min_size=1, max_size=2),
        "room": st.sampled_from([0, 1, 4]),
    },
    "claim_some": {
        "free": st.sampled_from([9, 9, 1, 2]),
        "models": st.sampled_from(["mn", "m"]),
    },
    "generate": {
        "tokens": st.integers(0, 2),
        "with_id": st.sampled_from([True] * 7 + [False]),
        "stores": st.booleans(),
    },
    "end_some": {
        "tokens": st.integers(0, 2),
        "outcome": st.sampled_from([AttemptOutcome.LOST] * 5 + list(AttemptOutcome)),
        "others": st.integers(0, 2),
        "pauses": st.sampled_from([False, False, True]),
        "starts_over": st.sampled_from([False, False, False, True]),
    },
    "change_workers": {
        "event": st.sampled_from(
            [1, 1, 1, 2, -1, -4, 1000, "heartbeat", "start", "stop", "change of the setting"]
        ),
    },
    "maintain": {
        "event": st.sampled_from(
            ["loss", "loss", "loss", "rescue", "expire", "rescue by a young server"]
            + ["death of a rescuer"] * 2
        ),
        "at": st.integers(0, 2),
    },
    "cancel": {"by": st.sampled_from(["id", "ids", "context_id", "model_name"])},
}
# One rule for all steps: if each had its own, hypothesis would leave some out of most examples, and
# few results would come to an end.
_STEP = st.sampled_from(
    ["enqueue"] * 2
    + ["claim_some"] * 4
    + ["generate"] * 2
    + ["end_some"] * 4
    + ["change_workers"] * 2
    + ["maintain", "maintain", "cancel"]
).flatmap(
    lambda name: st.tuples(
        st.just(name), st.fixed_dictionaries({**_STEPS[name], "which": _WHICH, "cut": _CUT})
    )
)


class Lifecycle(QueueMachine):
    """Results of one team, from their acceptance to their end."""

    @initialize(max_attempts=st.sampled_from([3, 3, 2, 1]), by_text=st.booleans())
    def settings(self, max_attempts: int, by_text: bool) -> None:
        self.begin(QueueModel(max_attempts=max_attempts, by_text=by_text))
        self.start_a_worker()

    @rule(step=_STEP)
    def take(self, step: tuple[str, dict[str, Any]]) -> None:
        name, members = step
        getattr(self, name)(**members)

    def _worker(self, which: int) -> UUID:
        """Return a living worker, of which there is always one, or seldom any."""
        if not self.model.living():
            self.start_a_worker()
        workers = self.model.living() if which < _MAX_WHICH else list(self.model.workers)
        return workers[-1 - which % len(workers)]

    # --- requests -------------------------------------------------------------------------------

    def enqueue(self, requests: list[Sent], room: int, which: int, cut: CutMoment | None) -> None:
        if len(self.model.select(state="pending")) > _MAX_PENDING:
            self.claim_some(which, 9, "mn", cut)
            return
        results = [one for request in requests for one in self._results(request)]
        self.send(results, Dispatcher(self._worker(which), room) if room else None, cut)

    def _results(self, request: Sent) -> list[NewResult]:
        first = self.new_id(is_late=request.is_late)
        context_id, new_context = first, None
        if request.context == "new":
            new_context = NewContext(first, "default", "a prompt", None, "{}")
        elif request.context == "stored" and self.model.contexts:
            context_id = list(self.model.contexts)[-1]
        results = []
        for number in range(1 + request.is_group):
            made = make_result(
                id=self.new_id() if number else first,
                context_id=context_id,
                new_context=new_context,
                model_name=request.model,
                parameters='{"max_tokens": 10000}',
                priority=request.priority,
                deadline_seconds=request.deadline * UNIT,
                on_disconnect=request.on_disconnect,
                resumable=request.resumable and self.model.continues,
                retain_seconds=UNIT if request.resumable else None,
                webhook_url="http://webhook.test/" if request.has_webhook else None,
                group_id=first if request.is_group else None,
                key=NewKey("k", b"", float(HALF_UNIT)) if request.has_key and not number else None,
                goes_with_key=request.has_key and number > 0,
            )
            results.append(made)
        return results

    # --- workers --------------------------------------------------------------------------------

    def claim_some(self, which: int, free: int, models: str, cut: CutMoment | None) -> None:
        """Claim as a worker does: first what waits, then suspects alone."""
        worker = self._worker(which)
        self.claim(worker, dict.fromkeys(models, free), cut)
        self.claim_suspects(worker, models)

    def generate(
        self, which: int, tokens: int, with_id: bool, stores: bool, cut: CutMoment | None
    ) -> None:
        attempt = self._attempt(which)
        if attempt is None:
            self.claim_some(which, 9, "mn", cut)
            return
        attempt.generate(tokens, with_id=with_id, by_text=self.model.by_text)
        if stores:
            self.store_text([attempt], cut, watched=which == 0)

    def end_some(
        self,
        which: int,
        tokens: int,
        outcome: AttemptOutcome,
        others: int,
        pauses: bool,
        starts_over: bool,
        cut: CutMoment | None,
    ) -> None:
        """End an attempt, and with the same statement others of its worker."""
        attempt = self._attempt(which)
        if attempt is None:
            self.claim_some(which, 9, "mn", cut)
            return
        attempt.generate(tokens, with_id=True, by_text=self.model.by_text)
        ends = [attempt, *self.beside(attempt)[:others]]
        self.end(ends, outcome, cut, starts_over=starts_over, pauses=pauses)

    def _attempt(self, which: int) -> Attempt | None:
        """Return an attempt that runs, or seldom one that is over and writes late."""
        attempts = self.over if which == _MAX_WHICH else self.attempts
        return attempts[-1 - which % len(attempts)] if attempts else None

    # --- everything else ------------------------------------------------------------------------

    def change_workers(self, event: Event, which: int, cut: CutMoment | None) -> None:
        """The clock jumps and all workers, or only the first ones, renew; or one changes."""
        worker = self._worker(which)
        match event:
            case int():
                self.jump(event)
                self._renew(self.model.living()[which:])
            case "start":
                self.start_a_worker()
            case "heartbeat":
                self.hand_back(worker)
            case "stop":
                assert self.run(self.queue.retire(worker), cut) == self.model.retire(worker)
            case "change of the setting":
                self.model.continues = not self.model.continues
                self.begin(self.model)

    def maintain(self, event: str, which: int, cut: CutMoment | None, at: int) -> None:
        """Expire or rescue on connections of which `at` may be cut; days pass after a rescuer's death."""
        if event == "expire":
            self._compare(self.run(self.queue.expire(), cut), self.model.expire(), cut)
            return
        if event != "rescue":
            attempt = self._attempt(which)
            self._renew([attempt.worker if attempt else self._worker(which)], -HALF_UNIT)
        if event == "death of a rescuer":
            self.run(self.bench.database.run(lambda one: mark_lost_workers(one, 0.0)), cut)
            self.model.mark_lost_workers()
            self.jump(1000)
            return
        marks = event != "rescue by a young server"
        count = self.run(self.queue.rescue(0.0 if marks else 1e9), cut, at)
        self._compare(count, self.model.rescue(marks=marks), cut)

    def _compare(self, count: int, modelled: int, cut: CutMoment | None) -> None:
        """Compare the count of rows that a step changed, unless its first answer was lost."""
        assert count == modelled or cut == "after", f"{count} rows, modelled {modelled}"

    def _renew(self, workers: Sequence[UUID], seconds: float = LEASE_SECONDS) -> None:
        for worker in workers:
            self.run(self.bench.tables.renew(worker, seconds))
            self.model.renew(worker, seconds)

    def cancel(self, by: str, which: int, cut: CutMoment | None) -> None:
        results = list(self.model.results.values())
        if by == "ids":
            self.run(self.queue.cancel_ids("default", [one.sent.id for one in results[-2:]]), cut)
            self.model.cancel(results[-2:])
        elif results:
            one = results[-1 - which % len(results)]
            filters = {by: getattr(one.sent, by)}
            # By an id, also a result that is marked already.
            marked = {} if by == "id" else {"is_cancelled": False}
            picked = self.model.select(**filters, **marked)
            count = self.run(self.queue.cancel("default", **filters), cut)
            self._compare(count, self.model.cancel(picked), cut)


@pytest.mark.slow("draws ten examples of all orders; `make soak` draws FUZZ times as many")
@pytest.mark.soak
@pytest.mark.timeout(300)
def test_results_live_as_the_model_says(queue_settings: Settings) -> None:
    run_machine(Lifecycle, queue_settings, examples=10)
