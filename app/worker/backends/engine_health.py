"""Health of each model's engine on each server, as one process sees it: by errors, silence and probes.

What each error means for an engine: docs/engine_errors.md.
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
from app.worker.attempt import Place
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
    """Which engines may be given results."""

    def __init__(self, registry: ModelRegistry, fleet: ServerPool, silence_seconds: float) -> None:
        self._registry = registry
        self._fleet = fleet
        self._silent_seconds = silence_seconds * _SILENT_SHARE
        self._probe_seconds = silence_seconds * _PROBE_SHARE
        self._breaker = CircuitBreaker(self._probe, self._on_circuit)
        self._on_change: list[Callable[[], None]] = []
        self._refreshes: set[asyncio.Task[None]] = set()
        fleet.on_report = self._on_report
        self.allows = self._breaker.allows
        self.succeeded = self._breaker.succeeded

    async def close(self) -> None:
        """End what runs in the background."""
        await self._breaker.close()
        await asyncio.gather(*self._refreshes, return_exceptions=True)

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call `handler` whenever an engine was found dead, or answers again."""
        self._on_change.append(handler)

    def record(self, error: GenerationError, place: Place) -> None:
        """Learn from an error of a stream there."""
        if isinstance(error, _DEAD):
            self._breaker.open(place, _one_line(error))
        elif isinstance(error, _AWAY):
            is_only = all(
                place_of(one, place[-1]) == place for one in self._fleet.serving(place[-1])
            )
            self._breaker.suspect(place, is_only=is_only)

    async def settled(self, model: str) -> None:
        """Wait a moment for the probes of a model's suspect engines."""
        places = [place_of(server, model) for server in self._fleet.serving(model)]
        waits = (self._breaker.settled(place, _SETTLING_SECONDS) for place in places)
        await asyncio.gather(*waits)

    async def clarified(self, error: UnclearError, place: Place) -> GenerationError:
        """Return the error itself where its engine answers a probe; else that of a dead engine."""
        if (await self._breaker.ask(place)).answer is ProbeOutcome.ANSWERED:
            return error
        return EngineDeadError(str(error))

    def is_silent(self, place: Place, asked_at: float) -> bool:
        """Whether nothing was answered there for long; `asked_at`: of the oldest request, loop time."""
        server = self._fleet.at(place[0])
        if server is None:
            return False
        heard_at = max(asked_at, server.heard_at.get(place[-1], 0.0))
        return asyncio.get_running_loop().time() - heard_at > self._silent_seconds

    async def is_dead(self, place: Place) -> bool:
        """Whether the engine there, which has been silent for long, answers no probe either."""
        probe = await self._breaker.ask(place)
        if probe.answer is ProbeOutcome.SILENT:
            self._breaker.open(place, probe.reason)
        return probe.answer in (ProbeOutcome.SILENT, ProbeOutcome.FAILED)

    def dead_engines(self) -> dict[str, dict[str, DeadEngine]]:
        """The engines that are known to be dead: by model, then by server."""
        found: dict[str, dict[str, DeadEngine]] = {}
        for server in self._fleet.servers:
            for model, dead in server.dead.items():
                found.setdefault(model, {})[server.name] = dead
        return found

    async def _probe(self, place: Place) -> Probe:
        """Generate one token."""
        server, model = self._fleet.at(place[0]), place[-1]
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
            # A connection that leads nowhere answers nothing either.
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

    def _on_circuit(self, place: Place) -> None:
        """Show at the server that a circuit opened or closed."""
        server, model, dead = self._fleet.at(place[0]), place[-1], self._breaker.dead(place)
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

    def _on_report(self, server: Server, model: str, dead: DeadEngine) -> None:
        """Another worker found an engine dead: ask before more work goes there."""
        self._breaker.on_report(place_of(server, model), dead.since)


def place_of(server: Server, model: str) -> Place:
    """The place of a model on a server: by its address, as its name may soon be another server's."""
    return server.address.grpc, model


def _one_line(error: GenerationError) -> str:
    return " ".join(str(error).split())[:300]
