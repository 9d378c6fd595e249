"""Generation on Triton: the attempt reads one stream; the backend knows which models are ready."""

import asyncio
from collections.abc import Callable

from app.errors import Failure, FailureCode
from app.job_queue import Claim, Outcome
from app.model_registry import ModelRegistry
from app.runner import Attempt, OnText
from app.triton_client import (
    Delta,
    GenerationError,
    ModelDeadError,
    ModelFailedError,
    NotTakenError,
    RefusedError,
    TritonClient,
)

_PROBE_SECONDS = 60.0  # a full engine answers when one of its results ends


class Generation(Attempt):
    """One result's text, from one gRPC stream."""

    def __init__(self, claim: Claim, triton: TritonClient, on_text: OnText) -> None:
        super().__init__(claim, on_text)
        self._triton = triton

    async def _work(self) -> tuple[Outcome, Failure | None]:
        claim = self.claim
        try:
            await self._triton.run(claim.model_name, claim.prompt, claim.parameters, self._hear)
        except GenerationError as error:
            return self._judge(error)
        if self.finish_reason is None:
            return Outcome.LOST, _triton_lost("the stream ended without a finish reason")
        return Outcome.COMPLETED, None

    def _hear(self, delta: Delta) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        self.has_answered = True
        if self.first_token_seconds is None and delta.text:
            self.first_token_seconds = self.heard_at - self.asked_at
        if delta.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
        self.completion_tokens += delta.completion_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.is_over = True
        if delta.logprobs is not None:
            self.tokens.append(delta.logprobs)
        if delta.model_version is not None:
            self.model_version = delta.model_version
        if delta.text:
            self._say(delta.text)

    def _judge(self, error: GenerationError) -> tuple[Outcome, Failure | None]:
        """What an error of the stream means for the attempt."""
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
    """Runs results on the models that Triton has ready."""

    def __init__(self, registry: ModelRegistry, triton: TritonClient) -> None:
        self._registry = registry
        self._triton = triton

    def ready(self) -> list[str]:
        """Names of the models that are ready now."""
        return self._registry.ready()

    def on_change(self, handler: Callable[[], None]) -> None:
        """Call `handler` whenever a model's readiness changed."""
        self._registry.on_change(handler)

    def attempt(self, claim: Claim, on_text: OnText) -> Attempt:
        """The attempt of a claim, still to be run."""
        return Generation(claim, self._triton, on_text)

    async def is_dead(self, name: str) -> bool:
        """Whether Triton itself says so; a model that is merely busy is given its time."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                await self._triton.run(name, "a", {"max_tokens": 1}, lambda _: None)
        except ModelDeadError:
            return True
        except (GenerationError, TimeoutError):
            return False
        return False


def _triton_lost(reason: object) -> Failure:
    return Failure(
        FailureCode.TRITON_LOST,
        f"Triton was lost in mid-request, in every attempt allowed ({reason}). Send again; if it "
        "recurs, look at Triton's log.",
        True,
    )
