"""Generation on Triton: the attempt reads one stream; the backend knows which server takes it."""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from app import telemetry, tracing
from app.circuit_breaker import Answer, CircuitBreaker, Probe
from app.errors import Failure, FailureCode
from app.fleet import DeadEngine, Fleet, Server
from app.job_queue import AttemptEnd, Claim, Outcome
from app.model_registry import ModelRegistry
from app.runner import Attempt, OnText, Place
from app.triton_client import CannotContinueError, Delta, EarlierText
from app.triton_errors import (
    EngineDeadError,
    EngineUnhealthyError,
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
)

logger = logging.getLogger(__name__)

_UNTRACED = contextlib.nullcontext()
# Shares of LLM_ENGINE_SILENCE_SECONDS: all streams of a model are silent for the first, then a probe
# is not answered for the second. The rest is the time between two looks.
_SILENT_SHARE = 0.4
_PROBE_SHARE = 0.5
_RESUME_REFUSED = "resume_token_ids"  # how a model's refusal to continue begins


class Generation(Attempt):
    """One result's text, from one gRPC stream. Its place is a model on a server."""

    def __init__(self, claim: Claim, backend: "TritonBackend", on_text: OnText) -> None:
        super().__init__(claim, on_text)
        self._backend = backend
        self.server: Server | None = None  # until it begins

    async def _work(self) -> tuple[Outcome, Failure | None]:
        resume = self.claim.resume
        if resume is not None and resume.fault is not None:
            return self._start_over(resume.fault)
        try:
            await self._generate()
        except CannotContinueError as error:
            return self._start_over(str(error))
        except UnclearError as error:
            return self._judge(await self._backend.clarified(error, self.place))
        except GenerationError as error:
            is_refusal = isinstance(error, RefusedError) and resume is not None
            if is_refusal and str(error).startswith(_RESUME_REFUSED):
                return self._start_over(str(error))
            return self._judge(error)
        if self.finish_reason is None:
            return Outcome.LOST, _triton_lost("the stream ended without a finish reason")
        return Outcome.COMPLETED, None

    async def _generate(self) -> None:
        """Have a server generate; one that does not take it leaves it to the next."""
        claim, tried = self.claim, set[str]()
        refusal: GenerationError = NotTakenError(f"no server has model {claim.model_name} ready")
        cannot_continue: CannotContinueError | None = None
        while (server := self._backend.choose(claim.model_name, tried)) is not None:
            self.server, self.place = server, _place(server, claim.model_name)
            try:
                with server.occupied(claim.model_name), self._traced(server) as traceparent:
                    await self._ask(server, traceparent)
            except CannotContinueError as error:
                cannot_continue = error
                tried.add(server.name)
            except ModelDeadError:
                raise  # the other streams there hang: the worker stops them
            except NotTakenError as error:
                if self.has_answered:  # it was taken: another's words must not follow its own
                    raise StreamLostError(str(error)) from error
                _count(error, claim.model_name)
                refusal = error
                tried.add(server.name)
                self._backend.record(error, self.place)
            else:
                return
        raise cannot_continue or refusal

    async def _ask(self, server: Server, traceparent: str | None) -> None:
        """Have a server generate the answer, or the rest of it. Raises CannotContinueError."""
        claim, resume = self.claim, self.claim.resume
        run = partial(server.client.run, claim.model_name)
        if resume is None:
            return await run(
                *(claim.prompt, claim.parameters, self._hear, traceparent),
                wants_ids=claim.resumable,
            )
        try:
            if resume.token_ids is None:
                raise CannotContinueError("the ids of its tokens are not known")
            return await run(
                *(claim.prompt, claim.parameters, self._hear, traceparent),
                wants_ids=True,
                earlier=EarlierText(resume.text, resume.token_ids),
            )
        except CannotContinueError:
            if not self._backend.continues_by_text or not resume.completion_tokens:
                raise
        parameters = rest_of(claim.parameters, resume.completion_tokens)
        if parameters["max_tokens"] <= 0:
            self.finish_reason = "length"
            return None
        return await run(claim.prompt + resume.text, parameters, self._hear, traceparent)

    def _start_over(self, reason: str) -> tuple[Outcome, Failure | None]:
        """Leave the result to an attempt that begins anew: a reader's text must not be replaced
        within one attempt."""
        self.starts_over = True
        message = (
            f"The text so far could not be continued ({reason}): the next attempt starts over."
        )
        return Outcome.RETURNED, Failure(FailureCode.NOT_CONTINUED, message, True)

    def _traced(self, server: Server) -> contextlib.AbstractContextManager[str | None]:
        """The span of a stream, if it is traced; the context that Triton is told."""
        claim = self.claim
        if claim.trace is None or tracing.active is None:
            return _UNTRACED
        attributes: tracing.Attributes = {
            "gen_ai.request.model": claim.model_name,
            "server.address": server.address.grpc,
            "llm.result_id": str(claim.id),
            "llm.attempt": claim.attempt,
        }
        return tracing.active.calling("triton", claim.trace, attributes)

    def _hear(self, delta: Delta) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        if self.server is not None:
            self.server.heard_at[self.claim.model_name] = self.heard_at
        self.has_answered = True
        if self.first_token_seconds is None and delta.text:
            self.first_token_seconds = self.heard_at - self.asked_at
        # A prompt that was continued by text has the earlier text in it.
        if delta.prompt_tokens and (self.claim.resume is None or self.prompt_tokens is None):
            self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens += delta.completion_tokens
        if delta.token_ids:
            self._ids += delta.token_ids
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.is_over = True
        if delta.logprobs is not None:
            try:
                self.tokens.append(delta.logprobs)
            except ValueError as error:
                message = f"The model's log probabilities cannot be read: {error}."
                raise ModelFailedError(message) from error
        if delta.model_version is not None:
            self.model_version = delta.model_version
        if delta.text:
            self._say(delta.text)

    def _judge(self, error: GenerationError) -> tuple[Outcome, Failure | None]:
        """What an error of the stream means for the attempt."""
        if isinstance(error, ModelDeadError) or not isinstance(error, NotTakenError):
            # What a server did not take is counted and recorded by then.
            _count(error, self.claim.model_name)
            self._backend.record(error, self.place)
        if isinstance(error, RefusedError):
            return Outcome.FAILED, Failure(FailureCode.INVALID_REQUEST, str(error), False)
        if isinstance(error, ModelFailedError):
            return Outcome.FAILED, Failure(FailureCode.MODEL_ERROR, str(error), True)
        self.model_is_dead = isinstance(error, ModelDeadError)
        outcome = Outcome.RETURNED if isinstance(error, NotTakenError) else Outcome.LOST
        return outcome, _triton_lost(error)

    def _lost(self) -> Failure:
        return _triton_lost("the model's process died")


class TritonBackend:
    """Runs results on the servers that have their models ready, the least busy one first."""

    def __init__(
        self,
        registry: ModelRegistry,
        fleet: Fleet,
        silence_seconds: float,
        *,
        continues_by_text: bool = False,
    ) -> None:
        """`silence_seconds`: after which an engine that answers nothing is taken for dead."""
        self.continues_by_text = continues_by_text
        self._registry = registry
        self._fleet = fleet
        self._silent_seconds = silence_seconds * _SILENT_SHARE
        self._probe_seconds = silence_seconds * _PROBE_SHARE
        self._breaker = CircuitBreaker(self._probe, self._on_circuit)
        self._on_change: list[Callable[[], None]] = []
        self._refreshes: set[asyncio.Task[None]] = set()
        fleet.on_report = self._on_report

    async def close(self) -> None:
        """End what runs in the background."""
        await self._breaker.close()
        await asyncio.gather(*self._refreshes, return_exceptions=True)

    def ready(self) -> list[str]:
        """Names of the models that are ready now."""
        return self._registry.ready()

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call `handler` whenever models or servers became ready, or ceased to be."""
        self._registry.on_change(handler)
        self._on_change.append(handler)

    # --- where results go -----------------------------------------------------------------------

    def free(self, attempts: Collection[Attempt], besides: Collection[str] = ()) -> dict[str, int]:
        """The free slots by model: each server's are shared between the models that it has ready."""
        slots = Counter[str]()
        for server in self._fleet.servers:
            for model, count in _share(server, besides).items():
                if self._breaker.allows(_place(server, model)):
                    slots[model] += count
        for attempt in attempts:
            if isinstance(attempt, Generation) and attempt.server is None:  # about to choose one
                slots[attempt.claim.model_name] -= 1
        return {model: count for model, count in slots.items() if count > 0}

    def choose(self, model: str, tried: Collection[str] = ()) -> Server | None:
        """The server that takes a result now: the one with the most room.

        None where no other than those already tried has the model ready and answers.
        """
        servers = [
            one
            for one in self._fleet.serving(model)
            if one.name not in tried and self._breaker.allows(_place(one, model))
        ]
        return min(
            servers, key=lambda one: (one.running.total() / one.slots, one.name), default=None
        )

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt:
        """The attempt of a claim, still to be run."""
        return Generation(claim, self, on_text)

    def servers(self, attempts: Collection[Attempt]) -> Counter[str]:
        """How many of these attempts run on each server."""
        return Counter(
            attempt.server.name
            for attempt in attempts
            if isinstance(attempt, Generation) and attempt.server is not None
        )

    # --- engines that die -----------------------------------------------------------------------

    def judge(self, place: Place, end: AttemptEnd) -> None:
        """Learn from the end of an attempt there: one that completed shows that its engine works."""
        if end.outcome is Outcome.COMPLETED:
            self._breaker.succeeded(place)

    def record(self, error: GenerationError, place: Place) -> None:
        """Learn from an error of a stream there."""
        if isinstance(error, ModelDeadError | EngineUnhealthyError | EngineDeadError):
            self._breaker.open(place, _one_line(error))
        elif isinstance(error, NotTakenError | StreamLostError):
            is_only = all(_place(one, place[-1]) == place for one in self._fleet.serving(place[-1]))
            self._breaker.suspect(place, is_only=is_only)

    async def clarified(self, error: UnclearError, place: Place) -> GenerationError:
        """The error itself where its engine answers a probe; else that of a dead engine."""
        if (await self._breaker.ask(place)).answer is Answer.ANSWERED:
            return error
        return EngineDeadError(str(error))

    def silent_places(self, attempts: Collection[Attempt]) -> list[Place]:
        """The places that answered nothing for long although something runs there."""
        asked: dict[Place, float] = {}
        for attempt in attempts:
            if isinstance(attempt, Generation) and attempt.server is not None:
                asked[attempt.place] = min(
                    attempt.asked_at, asked.get(attempt.place, attempt.asked_at)
                )
        return [place for place, first in asked.items() if self._is_silent(place, first)]

    def _is_silent(self, place: Place, asked_at: float) -> bool:
        server = self._fleet.at(place[0])
        if server is None:
            return False
        heard_at = max(asked_at, server.heard_at.get(place[-1], 0.0))
        return asyncio.get_running_loop().time() - heard_at > self._silent_seconds

    async def is_dead(self, place: Place) -> bool:
        """Whether the engine there, which has been silent for long, answers no probe either."""
        probe = await self._breaker.ask(place)
        if probe.answer is Answer.SILENT:
            self._breaker.open(place, probe.reason)
        return probe.answer in (Answer.SILENT, Answer.FAILED)

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
            return Probe(Answer.GONE)
        loop, seconds = asyncio.get_running_loop(), self._probe_seconds
        began = loop.time()
        try:
            async with asyncio.timeout(seconds):
                await server.client.run(model, "a", _PROBE_PARAMETERS, lambda _: None)
        except TimeoutError:
            if server.heard_at.get(model, 0.0) > began:
                return Probe(Answer.ANSWERED)  # its streams are: it is full
            # A connection that leads nowhere answers nothing either.
            await server.client.reconnect()
            return Probe(Answer.SILENT, f"no answer to one token within {seconds:g} s")
        except RefusedError:
            pass
        except GenerationError as error:
            is_dead = isinstance(error, ModelDeadError | EngineUnhealthyError | EngineDeadError)
            is_away = isinstance(error, NotTakenError | StreamLostError) and not is_dead
            return Probe(Answer.UNREACHED if is_away else Answer.FAILED, _one_line(error))
        server.heard_at[model] = loop.time()
        return Probe(Answer.ANSWERED)

    def _on_circuit(self, place: Place) -> None:
        """A circuit opened or closed: whoever looks at the server sees it."""
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
        self._breaker.on_report(_place(server, model), dead.since)


def rest_of(parameters: Mapping[str, Any], done: int) -> dict[str, Any]:
    """The parameters of a text of which `done` tokens are generated, and sent as a prompt."""
    rest = dict(parameters) | {"max_tokens": parameters["max_tokens"] - done}
    if parameters.get("min_tokens"):
        rest["min_tokens"] = max(0, parameters["min_tokens"] - done)
    return rest


def _place(server: Server, model: str) -> Place:
    """By its address: under its name there may soon be another server."""
    return server.address.grpc, model


def _share(server: Server, besides: Collection[str]) -> dict[str, int]:
    """A server's free slots, shared between its models, `besides` those that need none.

    Those of which it runs least come first when there are fewer slots than models.
    """
    models = [name for name in server.ready() if name not in besides]
    free = server.slots - server.running.total()
    if free <= 0 or not models:
        return {}
    models.sort(key=lambda name: server.running[name])
    share, rest = divmod(free, len(models))
    return {name: share + (place < rest) for place, name in enumerate(models)}


def _one_line(error: GenerationError) -> str:
    return " ".join(str(error).split())[:300]


_PROBE_PARAMETERS = {"max_tokens": 1, "temperature": 0}
_KINDS = (
    (ModelDeadError, "dead"),
    (EngineUnhealthyError, "dead"),
    (EngineDeadError, "dead"),
    (NotTakenError, "not_taken"),
    (StreamLostError, "lost"),
    (RefusedError, "refused"),
    (ModelFailedError, "failed"),
)


def _count(error: GenerationError, model: str) -> None:
    kind = next((name for family, name in _KINDS if isinstance(error, family)), telemetry.OTHER)
    telemetry.TRITON_ERRORS.of(model, kind).inc()


def _triton_lost(reason: object) -> Failure:
    return Failure(
        FailureCode.TRITON_LOST,
        f"Triton was lost in mid-request, in every attempt allowed ({reason}). Send again; if it "
        "recurs, look at Triton's log.",
        True,
    )
