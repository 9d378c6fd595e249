"""The order of claims and the running limits against a plain model, as in `test_queue_model.py`.

Each claim must return exactly the results that the model predicts, and each result must have the
virtual time that the model gives it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import initialize, rule

from app.core.settings import Settings
from app.queue.enqueue import NewContext
from app.queue.finish import AttemptOutcome
from app.queue.team_limits import ANY_MODEL
from tests.integration.queue.model_worker import Dispatcher
from tests.integration.queue.queue_bench import make_result
from tests.integration.queue.queue_machine import UNIT, QueueMachine, run_machine
from tests.integration.queue.queue_model import QueueModel

_TEAMS = ("a", "b", "c")
_MAX_PENDING = 20
_Place = tuple[str, str, int]  # team, model, priority
_PLACE = st.tuples(
    st.sampled_from(_TEAMS), st.sampled_from(["m", "m", "n"]), st.sampled_from([0, 0, 0, 5, -5])
)
_STEPS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "enqueue": {
        "places": st.lists(_PLACE, min_size=1, max_size=6),
        "is_late": st.sampled_from([False, False, True]),
        "room": st.sampled_from([0, 0, 2]),
    },
    "claim_some": {
        "free": st.sampled_from([1, 1, 2, 5]),
        "models": st.sampled_from(["m", "m", "mn"]),
        "which": st.integers(0, 1),
    },
    "end_some": {
        "which": st.integers(0, 5),
        "outcome": st.sampled_from(
            [AttemptOutcome.COMPLETED, AttemptOutcome.RETURNED, AttemptOutcome.LOST]
        ),
        "others": st.integers(0, 3),
        "pauses": st.sampled_from([False, False, True]),
    },
    "set_limits": {
        "team": st.sampled_from(_TEAMS),
        "model": st.sampled_from([ANY_MODEL, ANY_MODEL, "m"]),
        "values": st.fixed_dictionaries(
            {},
            optional={
                "max_running": st.integers(0, 3),
                "weight": st.sampled_from([1.0, 2.0, 3.0, 0.5]),
            },
        ),
    },
    "cancel_backlog": {"team": st.sampled_from(_TEAMS)},
    "replace_worker": {},
    "let_time_pass": {},
}
_STEP = st.sampled_from(
    ["enqueue"] * 4
    + ["claim_some"] * 5
    + ["end_some"] * 4
    + ["set_limits"] * 2
    + ["cancel_backlog", "let_time_pass", "replace_worker"]
).flatmap(lambda name: st.tuples(st.just(name), st.fixed_dictionaries(_STEPS[name])))


class FairQueue(QueueMachine):
    """Results of three teams, two models and three priorities, and limits that change."""

    @initialize(default=st.sampled_from([None, None, 2]))
    def settings(self, default: int | None) -> None:
        self.default_limit = default
        self.rows: dict[tuple[str, str], dict[str, float]] = {}
        self.begin(QueueModel(max_attempts=100), team_max_running=default)
        self.start_a_worker()

    @rule(step=_STEP)
    def take(self, step: tuple[str, dict[str, Any]]) -> None:
        name, members = step
        getattr(self, name)(**members)

    # --- limits ---------------------------------------------------------------------------------

    def set_limits(self, team: str, model: str, values: dict[str, float]) -> None:
        """Set the limits of a team; no values remove them."""
        if values:
            self.rows[team, model] = values
            self.run(self.limits.set(team, model, values))
        else:
            is_removed = self.run(self.limits.remove(team, model))
            assert is_removed == (self.rows.pop((team, model), None) is not None)
        self.run(self.limits.refresh())

    def limit(self, name: str, team: str, model: str) -> float | None:
        """Return a limit of a team for a model: by its row for the model, its row for any."""
        for row in (self.rows.get((team, model)), self.rows.get((team, ANY_MODEL))):
            if row is not None and name in row:
                return row[name]
        return None

    def running_limits(self, model: str) -> Mapping[str, int]:
        found = {team: self.limit("max_running", team, model) for team in _TEAMS}
        default = self.default_limit
        limits = {team: default if most is None else most for team, most in found.items()}
        return {team: int(most) for team, most in limits.items() if most is not None}

    # --- results --------------------------------------------------------------------------------

    def enqueue(self, places: Sequence[_Place], *, is_late: bool, room: int) -> None:
        if len(self.model.select(state="pending")) > _MAX_PENDING:
            return
        self.run(self.limits.load())
        results = []
        for team, model, priority in places:
            context = NewContext(self.new_id(), team, "a prompt", None, "{}")
            limits = self.limits.of(team, model)
            assert limits.weight == (self.limit("weight", team, model) or 1.0)
            assert limits.max_running == self.running_limits(model).get(team)
            results.append(
                make_result(
                    id=self.new_id(is_late=is_late),
                    team_id=team,
                    context_id=context.id,
                    new_context=context,
                    model_name=model,
                    priority=priority,
                    deadline_seconds=5000.5 * UNIT,
                    limits=limits,
                )
            )
        worker = self.model.living()[-1]
        self.send(results, Dispatcher(worker, room) if room else None)

    def claim_some(self, free: int, models: str, which: int) -> None:
        if which and len(self.model.living()) < 2:
            self.start_a_worker()
        worker = self.model.living()[which % 2]
        self.claim(worker, dict.fromkeys(models, free))
        self.claim_suspects(worker, models)

    def end_some(self, which: int, outcome: AttemptOutcome, others: int, *, pauses: bool) -> None:
        """End an attempt, and with the same statement others of its worker."""
        if not self.attempts:
            return
        attempt = self.attempts[-1 - which % len(self.attempts)]
        self.end([attempt, *self.beside(attempt)[:others]], outcome, pauses=pauses)

    def cancel_backlog(self, team: str) -> None:
        picked = self.model.select(team_id=team, model_name="m", is_cancelled=False)
        assert self.run(self.queue.cancel(team, model_name="m")) == self.model.cancel(picked)

    def replace_worker(self) -> None:
        """The last worker stops, and another starts."""
        *_, worker = self.model.living()
        assert self.run(self.queue.retire(worker)) == self.model.retire(worker)
        self.start_a_worker()

    def let_time_pass(self) -> None:
        self.jump(1)


@pytest.mark.slow("draws claims under all limits")
@pytest.mark.soak
def test_claims_follow_the_model(queue_settings: Settings) -> None:
    run_machine(FairQueue, queue_settings, examples=20)
