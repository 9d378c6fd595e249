"""Health of each model's engine on each server, as one process sees it: by errors, silence and probes.

The meaning of each error for an engine: docs/engine_errors.md.
"""

import asyncio
import logging
from collections.abc import Callable

from app.inference.model_registry import ModelRegistry
from app.inference.server_pool import DeadEngine, Server, ServerPool
from app.inference.triton_errors import (
    EngineDeadError,
    EngineUnhealthyError,
    GenerationError,
    ModelDeadError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
)
from app.worker.attempt import Target
from app.worker.backends.circuit_breaker import CircuitBreaker, Probe, ProbeOutcome

logger = logging.getLogger(__name__)

# Shares of LLM_ENGINE_SILENCE_SECONDS: all streams of a model are silent for the first, then a probe
# is not answered for the second. The rest is the time between two looks.
_SILENT_SHARE = 0.4
_PROBE_SHARE = 0.5
_SETTLING_SECONDS = 1.0  # that a claimed result waits for a probe, before it goes back
_PROBE_PARAMETERS = {"max_tokens": 1, "temperature": 0}
_DEAD = (ModelDeadError, EngineUnhealthyError, EngineDeadError)
_AWAY = (NotTakenError, StreamLostError)


class EngineHealth:
    def __init__(self, registry: ModelRegistry, pool: ServerPool, silence_seconds: float) -> None:
        self._registry = registry
        self._pool = pool
        self._silent_seconds = silence_seconds * _SILENT_SHARE
        self._probe_seconds = silence_seconds * _PROBE_SHARE
        self._breaker = CircuitBreaker(self._probe, self._on_circuit)
        self._on_change: list[Callable[[], None]] = []
        self._refreshes: set[asyncio.Task[None]] = set()
        # Another worker found an engine dead: ask before more work goes there.
        pool.on_report = lambda server, model, dead: self._breaker.on_report(
            target_of(server, model), dead.since
        )
        self.allows = self._breaker.allows
        self.succeeded = self._breaker.succeeded

    async def close(self) -> None:
        await self._breaker.close()
        await asyncio.gather(*self._refreshes, return_exceptions=True)

    def on_change(self, handler: Callable[[], None]) -> None:
        self._on_change.append(handler)

    def record(self, error: GenerationError, target: Target) -> None:
        if isinstance(error, _DEAD):
            self._breaker.open(target, _one_line(error))
        elif isinstance(error, _AWAY):
            is_only = all(
                target_of(one, target[-1]) == target for one in self._pool.serving(target[-1])
            )
            self._breaker.suspect(target, is_only=is_only)

    async def settled(self, model: str) -> None:
        targets = [target_of(server, model) for server in self._pool.serving(model)]
        waits = (self._breaker.settled(target, _SETTLING_SECONDS) for target in targets)
        await asyncio.gather(*waits)

    async def clarified(self, error: UnclearError, target: Target) -> GenerationError:
        """Return the error itself if its engine answers a probe, otherwise that of a dead engine."""
        if (await self._breaker.ask(target)).answer is ProbeOutcome.ANSWERED:
            return error
        return EngineDeadError(str(error))

    def is_silent(self, target: Target, asked_at: float) -> bool:
        """Return whether the target is silent for long; `asked_at`: of its oldest request, loop time."""
        server = self._pool.at(target[0])
        if server is None:
            return False
        heard_at = max(asked_at, server.heard_at.get(target[-1], 0.0))
        return asyncio.get_running_loop().time() - heard_at > self._silent_seconds

    async def is_dead(self, target: Target) -> bool:
        probe = await self._breaker.ask(target)
        if probe.answer is ProbeOutcome.SILENT:
            self._breaker.open(target, probe.reason)
        return probe.answer in (ProbeOutcome.SILENT, ProbeOutcome.FAILED)

    def dead_engines(self) -> dict[str, dict[str, DeadEngine]]:
        found: dict[str, dict[str, DeadEngine]] = {}
        for server in self._pool.servers:
            for model, dead in server.dead.items():
                found.setdefault(model, {})[server.name] = dead
        return found

    async def _probe(self, target: Target) -> Probe:
        server, model = self._pool.at(target[0]), target[-1]
        if server is None:
            return Probe(ProbeOutcome.GONE)
        loop, seconds = asyncio.get_running_loop(), self._probe_seconds
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                await server.client.run(model, "a", _PROBE_PARAMETERS, lambda _: None)
        except TimeoutError:
            if server.heard_at.get(model, 0.0) > began:
                return Probe(ProbeOutcome.ANSWERED)  # its streams are: it is full
            # A connection that leads nowhere answers nothing either. One that answers for other
            # models stays: it has their sessions.
            if max(server.heard_at.values(), default=0.0) <= began:
                await server.client.reconnect()
            return Probe(ProbeOutcome.SILENT, f"no answer to one token within {seconds:g} s")
        except RefusedError:
            pass
        except GenerationError as error:
            is_dead = isinstance(error, _DEAD)
            is_away = isinstance(error, _AWAY) and not is_dead
            return Probe(
                ProbeOutcome.UNREACHED if is_away else ProbeOutcome.FAILED, _one_line(error)
            )
        server.heard_at[model] = loop.time()
        return Probe(ProbeOutcome.ANSWERED)

    def _on_circuit(self, target: Target) -> None:
        server, model, dead = self._pool.at(target[0]), target[-1], self._breaker.dead(target)
        if server is None:
            return
        extra = {"server": server.name, "model": model}
        if dead is not None:
            server.dead[model] = dead
            logger.error(
                "model %s on server %s: %s", model, server.name, dead,
                extra=extra | {"action": "engine_dead"},
            )  # fmt: skip
        elif server.dead.pop(model, None) is not None:
            logger.info(
                "model %s on server %s answers again", model, server.name,
                extra=extra | {"action": "engine_answers"},
            )  # fmt: skip
        for handler in self._on_change:
            handler()
        refresh = asyncio.create_task(self._registry.refresh(), name="refresh models")
        self._refreshes.add(refresh)
        refresh.add_done_callback(self._refreshes.discard)


def target_of(server: Server, model: str) -> Target:
    """Return a model's target on a server: its address, since names are given again."""
    return server.address.grpc, model


def _one_line(error: GenerationError) -> str:
    return " ".join(str(error).split())[:300]
