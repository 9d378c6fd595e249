"""Attribution on an index: each attempt has a process of the engine to itself."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path

from app.core.errors import INTERNAL_ERROR, Failure, FailureCode
from app.core.queue_names import queue_of
from app.infini_gram.process import (
    AttributionFailedError,
    AttributionRefusedError,
    EngineDiedError,
    EngineProcess,
)
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.worker.attempt import Attempt, Backend, OnText, Target

logger = logging.getLogger(__name__)

# After a lost engine, before one more text is tried.
_FAILURE_PAUSE_SECONDS = 1.0
_ANSWERS = (FailureCode.INVALID_REQUEST, FailureCode.MODEL_ERROR)
_MAX_PAUSE_SECONDS = 30.0  # seconds between two starts of an engine that cannot be started


class AttributionBackend(Backend):
    """Runs attributions on one index, as many at a time as it has engines; `run` keeps them up."""

    def __init__(self, declarations: Path, index: str, engines: int) -> None:
        self._declarations = declarations.absolute()
        self._index = index
        self._queue = queue_of(index)
        self._count = engines
        self._first: EngineProcess | None = None
        self._idle: asyncio.Queue[EngineProcess] = asyncio.Queue()
        self._engines: set[EngineProcess] = set()  # those that have not ended
        self._failed_at: float | None = None  # loop time of the last engine lost
        self._on_change: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Start a first engine. Raises what `EngineProcess.start` raises."""
        self._first = await EngineProcess.start(self._declarations, self._index)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(self._count):
                group.create_task(self._keep(None if number else self._first))

    async def _keep(self, engine: EngineProcess | None) -> None:
        pause = 1.0
        while True:
            try:
                engine = engine or await EngineProcess.start(self._declarations, self._index)
            except (AttributionFailedError, EngineDiedError, OSError, TimeoutError) as error:
                logger.error(  # noqa: TRY400 # an operator's matter, without a traceback
                    "index %s cannot be opened: %s; trying again in %.0f s",
                    self._index, error, pause, extra={"action": "engine_failed"},
                )  # fmt: skip
                await asyncio.sleep(pause)
                pause = min(2 * pause, _MAX_PAUSE_SECONDS)
                continue
            pause = 1.0
            self._engines.add(engine)
            self._notify_change()
            self._idle.put_nowait(engine)
            try:
                await engine.wait()
            finally:
                self._engines.remove(engine)
                self._notify_change()
                await engine.end()
            engine = None

    def _notify_change(self) -> None:
        for handler in self._on_change:
            handler()

    def ready(self) -> list[str]:
        return [self._queue] if any(engine.is_alive for engine in self._engines) else []

    def on_change(self, handler: Callable[[], None]) -> None:
        self._on_change.append(handler)

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt:
        return Attribution(claim, self, on_text)

    def free(self, attempts: Collection[Attempt], exclude: Collection[str] = ()) -> dict[str, int]:
        slots = self._count - len(attempts) if self.ready() else 0
        if self._failed_at is not None:
            # One text that kills its engine must not be followed by others at once.
            is_over = asyncio.get_running_loop().time() >= self._failed_at + _FAILURE_PAUSE_SECONDS
            slots = min(slots, int(is_over and not attempts))
        return {self._queue: slots} if slots > 0 and self._queue not in exclude else {}

    def record_outcome(self, _target: Target, end: AttemptEnd) -> None:
        if end.outcome in (AttemptOutcome.LOST, AttemptOutcome.RETURNED):
            self._failed_at = asyncio.get_running_loop().time()
        elif end.failure is None or end.failure.code in _ANSWERS:
            self._failed_at = None

    async def close(self) -> None:
        """Do nothing: `run` ends the engines."""

    @contextlib.asynccontextmanager
    async def engine(self) -> AsyncIterator[EngineProcess]:
        """Reserve an engine; one whose work is cut short is ended."""
        engine = await self._idle.get()
        while not engine.is_alive:
            engine = await self._idle.get()
        try:
            yield engine
        except (AttributionRefusedError, AttributionFailedError):
            self._idle.put_nowait(engine)  # as good as before
            raise
        except BaseException:
            engine.kill()
            raise
        self._idle.put_nowait(engine)


class Attribution(Attempt):
    """One text's attribution: its JSON comes in one piece."""

    def __init__(self, claim: Claim, backend: AttributionBackend, on_text: OnText) -> None:
        super().__init__(claim, on_text)
        self._backend = backend

    async def _work(self) -> tuple[AttemptOutcome, Failure | None]:
        try:
            async with self._backend.engine() as engine:
                found = await engine.attribute(self.claim.prompt, self.claim.parameters)
        except EngineDiedError as error:
            return AttemptOutcome.LOST, _engine_lost(error)
        except AttributionRefusedError as error:
            return AttemptOutcome.FAILED, Failure(FailureCode.INVALID_REQUEST, str(error), False)
        except AttributionFailedError as error:
            if error.is_bug:
                return AttemptOutcome.FAILED, INTERNAL_ERROR
            return AttemptOutcome.FAILED, Failure(FailureCode.INFINI_GRAM_ERROR, str(error), False)
        self.prompt_tokens, self.finish_reason = found.tokens, "stop"
        self.model_version = found.version
        self.is_over = True  # the end writes it: no chunk of it is kept
        self._emit(found.answer)
        return AttemptOutcome.COMPLETED, None

    def _lost(self) -> Failure:
        return _engine_lost("its process was ended")


def _engine_lost(reason: object) -> Failure:
    return Failure(
        FailureCode.ENGINE_LOST,
        f"The index's engine was lost in every attempt allowed ({reason}). Send again; if it recurs, "
        "look at the attribution worker's log and memory.",
        True,
    )
