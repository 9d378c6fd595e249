"""The span of one request to Triton, by OpenTelemetry's conventions for generative AI (`app.core.gen_ai`).

It is the only one with attributes `gen_ai.*`: tools count each span that has them as a call of a model, with its
tokens. It has no text: neither of the prompt and the answer, nor stop texts, which the conventions recommend.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from app.core import gen_ai, tracing
from app.core.settings.fields import split_address
from app.inference.adapters import ADAPTER_PARAMETER, full_name
from app.inference.pooling import task_of
from app.inference.server_pool import Server
from app.queue.claim import Claim
from app.worker.attempt import Attempt

_UNTRACED = contextlib.nullcontext()
_TRITON_PORT = 8001
_KINDS = {"embed": "embedding", "score": "score", None: "generation"}  # by task
# The conventions' numbers, and their types.
_PARAMETERS: tuple[tuple[str, Callable[[Any], float]], ...] = (
    ("max_tokens", int),
    ("temperature", float),
    ("top_p", float),
    ("top_k", float),
    ("frequency_penalty", float),
    ("presence_penalty", float),
    ("seed", int),
)
_FLOAT_BYTES = 4

_Attributes = dict[str, str | int | float | bool | list[str]]


def traced(attempt: Attempt, server: Server) -> contextlib.AbstractContextManager[str | None]:
    """Span around a request of an attempt; yields the context that Triton gets, None without one."""
    claim = attempt.claim
    if claim.trace is None or tracing.active is None:
        return _UNTRACED
    began = asyncio.get_running_loop().time()
    attributes = _request(claim, server)
    name = f"{attributes['gen_ai.operation.name']} {attributes['gen_ai.request.model']}"
    return tracing.active.calling(name, claim.trace, attributes, lambda: _answer(attempt, began))


def _request(claim: Claim, server: Server) -> _Attributes:
    task = task_of(claim.parameters)
    host, port = split_address(server.address.grpc, _TRITON_PORT)
    operation = gen_ai.operation_of(_KINDS[task], is_chat=claim.is_chat)
    assert operation is not None, "a model runs"
    attributes: _Attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": gen_ai.PROVIDER,
        "gen_ai.request.model": _model(claim),
        "server.address": host,
        "server.port": port,
        "llm.result_id": str(claim.id),
        "llm.attempt": claim.attempt,
        "llm.team_id": claim.team_id,
    }
    if task is None:
        attributes["gen_ai.request.stream"] = True
        attributes |= _sampling(claim.parameters)
    return attributes


def _sampling(parameters: Mapping[str, Any]) -> _Attributes:
    found: _Attributes = {
        f"gen_ai.request.{name}": to_type(parameters[name])
        for name, to_type in _PARAMETERS
        if parameters.get(name) is not None
    }
    constraint = parameters.get("structured_outputs")
    if constraint is not None:
        is_json = "json" in constraint or "json_object" in constraint
        found["gen_ai.output.type"] = "json" if is_json else "text"
    return found


def _answer(attempt: Attempt, began: float) -> _Attributes:
    """Attributes of the end. `began`: loop time of the span, before which other servers may have refused."""
    task = task_of(attempt.claim.parameters)
    found: _Attributes = {}
    if attempt.has_answered:
        found["gen_ai.response.model"] = _model(attempt.claim)
        if attempt.prompt_tokens is not None:
            found["gen_ai.usage.input_tokens"] = attempt.prompt_tokens
        if task is None:
            found |= _generated(attempt, began)
        elif task == "embed" and attempt.vector is not None:
            found["gen_ai.embeddings.dimension.count"] = len(attempt.vector) // _FLOAT_BYTES
    # Ends of a stream without an error of its own; one that has an error is known by that.
    if attempt.finish_reason is None:
        found["error.type"] = "StreamLostError"
    elif task is not None and attempt.vector is None:
        found["error.type"] = "ModelFailedError"
    return found


def _generated(attempt: Attempt, began: float) -> _Attributes:
    found: _Attributes = {
        "gen_ai.response.id": str(attempt.claim.id),
        "gen_ai.usage.output_tokens": attempt.generated_tokens,
    }
    if attempt.first_token_seconds is not None:
        first = attempt.asked_at + attempt.first_token_seconds - began
        found["gen_ai.response.time_to_first_chunk"] = max(0.0, first)
    if attempt.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [attempt.finish_reason]
    return found


def _model(claim: Claim) -> str:
    return full_name(claim.model_name, claim.parameters.get(ADAPTER_PARAMETER))
