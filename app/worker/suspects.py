"""Suspects of a worker: it looks for those that have their turn, runs them alone, and leaves their models to others.

The others have a model for as long as suspects took it from them (`app/queue/suspects`). That is the time of a
run, until the engine that it ended is back, or the time that a suspect waited in vain for the end of the
results that still run.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from uuid import UUID

from app.queue.claim import Claim
from app.queue.job_queue import JobQueue
from app.worker.attempt import Attempt, Backend

_AWAY_SECONDS = 600.0  # that an engine which a suspect ended is waited for
# That a suspect waits for the end of results that run, while no other begins; doubles each time.
_FIRST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 10.0, 600.0


@dataclass(slots=True)
class _RanAlone:
    """A suspect that ended here, in the loop's time."""

    model_name: str
    team_id: str
    began_at: float
    ended_at: float
    was_away: bool = False  # its model, when it was looked at last


class Suspects:
    def __init__(self, queue: JobQueue, backend: Backend) -> None:
        self._queue = queue
        self._backend = backend
        self._alone_since: dict[UUID, float] = {}  # the loop's time at which it was claimed
        self._ran_alone: list[_RanAlone] = []
        self._held_since: dict[str, float] = {}  # models of which one waits for the others' ends
        self._vain: dict[str, int] = {}  # waits in a row

    @property
    def is_pause_due(self) -> bool:
        return bool(self._ran_alone)

    def on_end(self, claim: Claim) -> None:
        now = _now()
        began_at = self._alone_since.pop(claim.id, now)
        self._ran_alone.append(_RanAlone(claim.model_name, claim.team_id, began_at, now))

    async def claim(self, worker_id: UUID, models: Collection[str]) -> Sequence[Claim]:
        """Claim those that have their turn on these models, if nothing else of them runs."""
        in_turn = await self._queue.suspects_in_turn([*models]) if models else {}
        claims = await self._queue.claim_suspects(worker_id, [*in_turn]) if in_turn else []
        now = _now()
        for claim in claims:
            self._alone_since[claim.id] = now
            self._vain.pop(claim.model_name, None)
            in_turn.pop(claim.model_name, None)
        self._held_since = {model: self._held_since.get(model, now) for model in in_turn}
        for model, team_id in in_turn.items():
            await self._end_wait(model, team_id, now - self._held_since[model])
        return claims

    async def _end_wait(self, model: str, team_id: str, seconds: float) -> None:
        """Leave a model to others if a suspect has waited in vain for the end of those that run."""
        vain = self._vain.get(model, 0)
        if seconds >= min(_FIRST_WAIT_SECONDS * 2**vain, _MOST_WAIT_SECONDS):
            await self._queue.pause_suspects(model, team_id, seconds)
            self._vain[model] = vain + 1
            del self._held_since[model]

    async def pause(self, attempts: Collection[Attempt]) -> None:
        """Leave the models of those that ran alone to others; `attempts` run here.

        An engine that one ended takes the model from them, too, until it is back: the pause grows as long.
        """
        running = {attempt.claim.model_name for attempt in attempts}
        present = running | self._backend.free(attempts).keys()
        for one in [*self._ran_alone]:
            is_back = one.model_name in present
            until = one.ended_at if is_back and not one.was_away else _now()
            await self._queue.pause_suspects(one.model_name, one.team_id, until - one.began_at)
            one.was_away = not is_back
            if is_back or until - one.ended_at >= _AWAY_SECONDS:
                self._ran_alone.remove(one)


def _now() -> float:
    return asyncio.get_running_loop().time()
