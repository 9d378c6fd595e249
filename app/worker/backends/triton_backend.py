"""Generation on Triton: an attempt reads one generation; the backend chooses the server."""

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

from app.core.errors import GRAMMAR_TOO_SLOW, Failure, FailureCode
from app.inference.images import IMAGES
from app.inference.model_registry import ModelRegistry
from app.inference.pooling import task_of
from app.inference.server_pool import Server, ServerPool
from app.inference.triton_client import CannotContinueError
from app.inference.triton_errors import (
    GenerationError,
    GrammarTooSlowError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    StreamLostError,
    UnclearError,
    count_error,
)
from app.inference.triton_messages import ID_BYTES, Delta, EarlierText
from app.queue.claim import Claim
from app.queue.finish import AttemptEnd, AttemptOutcome
from app.worker.attempt import Attempt, OnText, Target
from app.worker.backends.engine_health import EngineHealth, target_of
from app.worker.backends.generation_span import traced
from app.worker.backends.stored_images import LoadImages, refuse_images
from app.worker.output_check import check_output

_RESUME_REFUSED = "resume_token_ids"  # how a model's refusal to continue begins
# Finish reasons of generations that vLLM or our backend gave up.
_GIVEN_UP = frozenset(("abort", "error", GRAMMAR_TOO_SLOW.code))


class Generation(Attempt):
    """One result's text. Its target is a model on a server."""

    def __init__(self, claim: Claim, backend: "TritonBackend", on_text: OnText) -> None:
        super().__init__(claim, on_text)
        self._backend = backend
        self.server: Server | None = None  # until it begins
        self._parameters = claim.parameters  # with its images, once they are read
        self._with_images = contextlib.ExitStack()  # their room until the first token

    async def _work(self) -> tuple[AttemptOutcome, Failure | None]:
        resume = self.claim.resume
        if resume is not None and resume.fault is not None:
            return self._start_over(resume.fault)
        try:
            with self._with_images:
                await self._generate()
        except CannotContinueError as error:
            return self._start_over(str(error))
        except UnclearError as error:
            return self._to_outcome(await self._backend.health.clarified(error, self.target))
        except GenerationError as error:
            is_refusal = isinstance(error, RefusedError) and resume is not None
            if is_refusal and str(error).startswith(_RESUME_REFUSED):
                return self._start_over(str(error))
            return self._to_outcome(error)
        if self.finish_reason is None:
            return AttemptOutcome.LOST, _triton_lost("the stream ended without a finish reason")
        if self.vector is None and task_of(self.claim.parameters) is not None:
            return self._to_outcome(ModelFailedError("The model returned no vector."))
        failure = await self._backend.check_output(self.claim, self.finish_reason, self.text)
        return AttemptOutcome.FAILED if failure else AttemptOutcome.COMPLETED, failure

    async def _generate(self) -> None:
        claim, tried = self.claim, set[str]()
        if IMAGES in claim.parameters:
            images = await self._backend.load_images(claim, self._with_images)
            self._parameters = claim.parameters | {IMAGES: images}
            self.asked_at = asyncio.get_running_loop().time()  # its team's room may have been full
        refusal: GenerationError = NotTakenError(f"no server has model {claim.model_name} ready")
        cannot_continue: CannotContinueError | None = None
        server = await self._backend.choose_settled(claim.model_name)
        while server is not None:
            self.server, self.target = server, target_of(server, claim.model_name)
            try:
                with server.occupied(claim.model_name), traced(self, server) as traceparent:
                    await self._ask(server, traceparent)
            except CannotContinueError as error:
                cannot_continue = error
                tried.add(server.name)
            except ModelDeadError:
                raise  # the other streams there hang: the worker stops them
            except NotTakenError as error:
                if self.has_answered:  # it was taken: another's words must not follow its own
                    raise StreamLostError(str(error)) from error
                count_error(error, claim.model_name)
                refusal = error
                tried.add(server.name)
                self._backend.health.record(error, self.target)
            else:
                return
            server = self._backend.choose(claim.model_name, tried)
        raise cannot_continue or refusal

    async def _ask(self, server: Server, traceparent: str | None) -> None:
        """Generate the answer, or the rest of it. Raises CannotContinueError."""
        claim, resume = self.claim, self.claim.resume
        run = partial(server.client.run, claim.model_name, live=self.live)
        if resume is None:
            return await run(
                *(claim.prompt, self._parameters, self._on_delta, traceparent),
                wants_ids=claim.resumable,
            )
        try:
            if resume.token_ids is None:
                raise CannotContinueError("the ids of its tokens are not known")
            return await run(
                *(claim.prompt, claim.parameters, self._on_delta, traceparent),
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
        return await run(claim.prompt + resume.text, parameters, self._on_delta, traceparent)

    def _start_over(self, reason: str) -> tuple[AttemptOutcome, Failure | None]:
        """Leave the result to an attempt that begins again: a reader's text must not be replaced
        within one attempt."""
        self.starts_over = True
        message = (
            f"The text so far could not be continued ({reason}): the next attempt starts over."
        )
        return AttemptOutcome.RETURNED, Failure(FailureCode.NOT_CONTINUED, message, True)

    def _on_delta(self, delta: Delta) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        if self.server is not None:
            self.server.heard_at[self.claim.model_name] = self.heard_at
        self.has_answered = True
        self._with_images.close()
        if self.first_token_seconds is None and delta.text:
            self.first_token_seconds = self.heard_at - self.asked_at
        # A prompt that was continued by text has the earlier text in it.
        if delta.prompt_tokens and (self.claim.resume is None or self.prompt_tokens is None):
            self.prompt_tokens = delta.prompt_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.vector is not None:
            self.vector = _checked(delta.vector)
        self._count_tokens(delta)
        if delta.finish_reason is not None and delta.finish_reason not in _GIVEN_UP:
            self.finish_reason = delta.finish_reason
            self.is_over = True
        if delta.model_version is not None:
            self.model_version = delta.model_version
        if delta.text:
            self._emit(delta.text)
        if delta.finish_reason in _GIVEN_UP:
            raise self._given_up(delta.finish_reason)

    def _given_up(self, reason: str | None) -> GenerationError:
        if reason == "abort":  # all generations of an engine that is being stopped
            return StreamLostError("the engine aborted the generation")
        if reason == GRAMMAR_TOO_SLOW.code:
            return GrammarTooSlowError(GRAMMAR_TOO_SLOW.message)
        if "structured_outputs" in self.claim.parameters:  # a grammar that cannot be compiled
            return RefusedError("structured_outputs: the engine cannot follow this constraint")
        return ModelFailedError("The engine failed at the generation.")

    def _count_tokens(self, delta: Delta) -> None:
        self.completion_tokens += delta.completion_tokens
        if delta.token_ids:
            self._ids += delta.token_ids
        if delta.completion_tokens * ID_BYTES != len(delta.token_ids or b""):
            self._lacks_ids = True
        if delta.logprobs is not None:
            try:
                self.tokens.append(delta.logprobs)
            except ValueError as error:
                message = f"The model's log probabilities cannot be read: {error}."
                raise ModelFailedError(message) from error

    def _to_outcome(self, error: GenerationError) -> tuple[AttemptOutcome, Failure | None]:
        if isinstance(error, ModelDeadError) or not isinstance(error, NotTakenError):
            # Requests that a server did not take are counted and recorded by then.
            count_error(error, self.claim.model_name)
            self._backend.health.record(error, self.target)
        if isinstance(error, GrammarTooSlowError):
            return AttemptOutcome.FAILED, GRAMMAR_TOO_SLOW
        if isinstance(error, RefusedError):
            return AttemptOutcome.FAILED, Failure(FailureCode.INVALID_REQUEST, str(error), False)
        if isinstance(error, ModelFailedError):
            return AttemptOutcome.FAILED, Failure(FailureCode.MODEL_ERROR, str(error), True)
        self.model_is_dead = isinstance(error, ModelDeadError)
        was_taken = not isinstance(error, NotTakenError)
        return AttemptOutcome.LOST if was_taken else AttemptOutcome.RETURNED, _triton_lost(error)

    def _lost(self) -> Failure:
        return _triton_lost("the model's process died")


class TritonBackend:
    """Runs results on the servers that have their models ready, the least busy one first."""

    def __init__(
        self,
        registry: ModelRegistry,
        pool: ServerPool,
        silence_seconds: float,
        *,
        continues_by_text: bool = False,
        load_images: LoadImages = refuse_images,
    ) -> None:
        """`silence_seconds`: an engine that answers nothing for so long is dead."""
        self.load_images = load_images
        self.continues_by_text = continues_by_text
        self.health = EngineHealth(registry, pool, silence_seconds)
        self._registry = registry
        self._pool = pool
        self.ready = registry.ready
        self.check_output = partial(check_output, registry=registry)
        self.is_dead = self.health.is_dead
        self.dead_engines = self.health.dead_engines
        self.close = self.health.close

    def on_change(self, handler: Callable[[], None]) -> None:
        self._registry.on_change(handler)
        self.health.on_change(handler)

    def free(self, attempts: Collection[Attempt], exclude: Collection[str] = ()) -> dict[str, int]:
        """Return the free slots by model; each server shares its own between its ready models."""
        slots = Counter[str]()
        for server in self._pool.servers:
            for model, count in _share(server, exclude).items():
                if self.health.allows(target_of(server, model)):
                    slots[model] += count
        for attempt in attempts:
            if isinstance(attempt, Generation) and attempt.server is None:  # about to choose one
                slots[attempt.claim.model_name] -= 1
        return {model: count for model, count in slots.items() if count > 0}

    def choose(self, model: str, tried: Collection[str] = ()) -> Server | None:
        """The server with the most room that has the model ready and answers."""
        servers = [
            one
            for one in self._pool.serving(model)
            if one.name not in tried and self.health.allows(target_of(one, model))
        ]
        return min(
            servers, key=lambda one: (one.running.total() / one.slots, one.name), default=None
        )

    async def choose_settled(self, model: str) -> Server | None:
        """Choose, if need be after a moment for the probes of the model's engines."""
        if (server := self.choose(model)) is None:
            await self.health.settled(model)
            server = self.choose(model)
        return server

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt:
        attempt = Generation(claim, self, on_text)
        attempt.keeps_text_without_ids = self.continues_by_text
        return attempt

    def record_outcome(self, target: Target, end: AttemptEnd) -> None:
        is_whole = end.failure is not None and end.failure.code is FailureCode.INVALID_OUTPUT
        if end.outcome is AttemptOutcome.COMPLETED or is_whole:
            self.health.succeeded(target)

    def servers(self, attempts: Collection[Attempt]) -> Counter[str]:
        return Counter(
            attempt.server.name
            for attempt in attempts
            if isinstance(attempt, Generation) and attempt.server is not None
        )

    def silent_targets(self, attempts: Collection[Attempt]) -> list[Target]:
        asked: dict[Target, float] = {}
        for attempt in attempts:  # the target of one that has no server yet is never silent
            asked[attempt.target] = min(
                attempt.asked_at, asked.get(attempt.target, attempt.asked_at)
            )
        return [target for target, at in asked.items() if self.health.is_silent(target, at)]


def _checked(vector: bytes) -> bytes:
    """A vector of numbers. Raises ModelFailedError: JSON has neither infinity nor NaN."""
    if not vector or not math.isfinite(sum(memoryview(vector).cast("f"))):
        raise ModelFailedError("The model computed no numbers for this text.")
    return vector


def rest_of(parameters: Mapping[str, Any], done: int) -> dict[str, Any]:
    """Return the parameters for the rest of a text whose first `done` tokens are in its prompt."""
    rest = dict(parameters) | {"max_tokens": parameters["max_tokens"] - done}
    if parameters.get("min_tokens"):
        rest["min_tokens"] = max(0, parameters["min_tokens"] - done)
    return rest


def _share(server: Server, exclude: Collection[str]) -> dict[str, int]:
    """A server's free slots, shared between its models; those of which it runs least come first."""
    models = [name for name in server.ready() if name not in exclude]
    free = server.slots - server.running.total()
    if free <= 0 or not models:
        return {}
    models.sort(key=lambda name: server.running[name])
    share, rest = divmod(free, len(models))
    return {name: share + (number < rest) for number, name in enumerate(models)}


def _triton_lost(reason: object) -> Failure:
    return Failure(
        FailureCode.TRITON_LOST,
        f"Triton was lost in mid-request, in every attempt allowed ({reason}). Send again; if it "
        "recurs, look at Triton's log.",
        True,
    )
