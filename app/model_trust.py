"""Which models may be given results: Triton's readiness does not see a dead engine, streams do."""

import asyncio
from collections.abc import Iterable

from app.errors import FailureCode
from app.job_queue import AttemptEnd, Outcome
from app.runner import Attempt, Backend

_DOUBT_SECONDS = 1.0  # after a lost stream, before one more result is risked on its model
_SILENCE_SECONDS = 10.0  # of all streams of a model, before it is probed
_ANSWERS = (FailureCode.INVALID_REQUEST, FailureCode.MODEL_ERROR)


class ModelTrust:
    """Doubts a model whose stream was lost, until it has answered again.

    Without this, results would burn their attempts on a dead engine that Triton still calls
    ready. A doubtful model is given one result at a time.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._doubtful: dict[str, float] = {}  # model -> loop time of its last lost stream

    def judge(self, model: str, end: AttemptEnd) -> None:
        """Learn from the end of an attempt; one stopped by its user or deadline teaches nothing."""
        if end.outcome in (Outcome.LOST, Outcome.RETURNED):
            self._doubtful[model] = asyncio.get_running_loop().time()
        elif end.failure is None or end.failure.code in _ANSWERS:
            self._doubtful.pop(model, None)

    def restrict(self, slots: dict[str, int], attempts: Iterable[Attempt]) -> dict[str, int]:
        """The slots that may be filled now, given the attempts that run."""
        now = asyncio.get_running_loop().time()
        busy = set()
        for attempt in attempts:
            model = attempt.claim.model_name
            busy.add(model)
            if attempt.has_answered and attempt.heard_at > self._doubtful.get(model, now):
                del self._doubtful[model]
        for model, since in self._doubtful.items():
            if model in slots:
                may_try = slots[model] and now >= since + _DOUBT_SECONDS and model not in busy
                slots[model] = int(may_try)
        return {model: count for model, count in slots.items() if count}

    async def find_dead(self, attempts: Iterable[Attempt]) -> list[str]:
        """The models all of whose streams are silent because their process is gone."""
        heard: dict[str, float] = {}
        for attempt in attempts:
            model = attempt.claim.model_name
            heard[model] = max(heard.get(model, 0.0), attempt.heard_at)
        now = asyncio.get_running_loop().time()
        return [
            model
            for model, at in heard.items()
            if now - at > _SILENCE_SECONDS and await self._backend.is_dead(model)
        ]
