"""The ways in which a generation can end early, and the meaning of a model's error message.

A stream's error reaches the client as text alone. Each pattern's source is in docs/engine_errors.md.
"""

import re
from collections.abc import Callable

from app.core import metrics


class GenerationError(Exception):
    """Base of all ways in which a generation can end without its last token."""


class NotTakenError(GenerationError):
    """Triton could not be reached, or its model is not ready: nothing ran."""


class ModelDeadError(NotTakenError):
    """The model's process is gone although Triton calls it ready.

    Triton never ends the streams that were open to it, so the worker must stop them (measured with
    Triton 2.51).
    """


class EngineUnhealthyError(NotTakenError):
    """The backend refuses every request because its engine is dead: nothing ran."""


class StreamLostError(GenerationError):
    """Triton may have taken the request, then the stream broke: the server or its engine died."""


class EngineDeadError(StreamLostError):
    """The engine died while it had the request, and the model stays ready."""


class RefusedError(GenerationError):
    """The model refused the request itself."""


class GrammarTooSlowError(RefusedError):
    """The constraint of the text took too much of the engine's time, and the backend ended it."""


class ModelFailedError(GenerationError):
    """The model reported an error while it ran the request."""


class UnclearError(ModelFailedError):
    """The backend reported an error that a dead engine and a wrong request can both cause.

    A probe of the same model on the same server decides.
    """


Rule = tuple[Callable[[str], object], type[GenerationError]]

# Our backends put the code's name first; the rest are the words of Triton, gRPC and NVIDIA's backend.
# (The header that asks Triton 2.51 for status codes, `triton_grpc_error`, makes it crash under load.)
_CODED = re.compile(r"(INVALID_ARG|UNAVAILABLE|INTERNAL): (.*)", re.DOTALL)
# NVIDIA's backend puts this before every exception of a running request, vLLM's refusals among them.
_GENERATING = re.compile(r"Error generating stream: ?(.*)", re.DOTALL)
_SAMPLING_UNREADABLE = re.compile(r"'NoneType' object has no attribute 'lora_name'")

_OTHER_TENSORS = re.compile(
    r"unexpected inference (input|output) '|expected \d+ inputs but got \d+"
)
_OTHER_TENSORS_ADVICE = (
    "The model lacks the tensors of Triton's vLLM backend (text_input, sampling_parameters, "
    "text_output, ...): {}"
)
_UNREADABLE_ADVICE = (
    "The model's backend could not read the sampling parameters: a name is unknown to its vLLM, or a "
    "value is out of range. Triton's log names the parameter."
)


def _compiled(*messages: tuple[str, type[GenerationError]]) -> list[Rule]:
    return [(re.compile(pattern, re.DOTALL).search, family) for pattern, family in messages]


# Outside of a running request.
_RULES = _compiled(
    (r"Stub process .* is not healthy", ModelDeadError),
    (r"Model is unavailable due to unhealthy vLLM engine", EngineUnhealthyError),
    (r"vLLM engine is not healthy and model will be unloaded", EngineUnhealthyError),
    (r"unknown model|not at ready state|is not ready|no available versions", NotTakenError),
    (r"Cannot create tasks after shutdown has been requested", NotTakenError),
    (r"LoRA feature is not enabled|LoRA .{0,512} is not supported, we currently", RefusedError),
    (r"Request was cancelled", StreamLostError),
)
# Behind "Error generating stream: ". A message may quote the prompt, so that a pattern for a dead engine
# matches at the message's beginning only.
_GENERATING_RULES = _compiled(
    (r"^EngineCore encountered an issue|^EngineDeadError", EngineDeadError),
    # vLLM's engine before version 0.8.
    (r"^Engine loop (is not running|has died)", EngineDeadError),
    (r"^Background loop (has errored already|is stopped)", EngineDeadError),
    (r"^Task finished unexpectedly", EngineDeadError),
    # vLLM's form of a refused parameter.
    (r" \(parameter=\w{1,64}, value=", RefusedError),
    (r"^This model's maximum context length is", RefusedError),
    (r"^The (decoder |encoder )?prompt .{0,64}longer than the maximum model length", RefusedError),
    (r"^The (decoder |encoder )?prompt cannot be empty", RefusedError),
    (r"^Grammar error: ", RefusedError),
    (r"^Model .{0,256} does not support '\w{1,32}' request", RefusedError),
    (r"^VLLM backend does not support '\w{1,32}' request", RefusedError),
    (r"^When streaming, `exclude_input_in_output`", RefusedError),
)


def to_model_error(message: str) -> GenerationError:
    message = message.replace("\x00", "\ufffd")  # PostgreSQL's text cannot hold NUL
    coded = _CODED.match(message)
    if coded:  # the rest is the model's, and may quote the prompt
        kinds = {"INVALID_ARG": RefusedError, "UNAVAILABLE": StreamLostError}
        return kinds.get(coded[1], ModelFailedError)(coded[2])
    generating = _GENERATING.match(message)
    if _OTHER_TENSORS.search(message):
        return RefusedError(_OTHER_TENSORS_ADVICE.format(message))
    if generating is None:
        return _first(_RULES, message, ModelFailedError)(message)
    if _SAMPLING_UNREADABLE.match(generating[1]):
        return RefusedError(_UNREADABLE_ADVICE)
    family = _first(_GENERATING_RULES, generating[1], UnclearError)
    return family(generating[1] if family is RefusedError else message)


def _first(
    rules: list[Rule], message: str, otherwise: type[GenerationError]
) -> type[GenerationError]:
    return next((family for search, family in rules if search(message)), otherwise)


ERROR_KINDS = (
    (ModelDeadError, "dead"),
    (EngineUnhealthyError, "dead"),
    (EngineDeadError, "dead"),
    (NotTakenError, "not_taken"),
    (StreamLostError, "lost"),
    (RefusedError, "refused"),
    (ModelFailedError, "failed"),
)


def count_error(error: GenerationError, model: str) -> None:
    """Count it in the metrics by its kind."""
    kind = next((name for family, name in ERROR_KINDS if isinstance(error, family)), metrics.OTHER)
    metrics.TRITON_ERRORS.of(model, kind).inc()
