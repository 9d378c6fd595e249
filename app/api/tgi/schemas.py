"""Requests of Text Generation Inference, validated and converted.

https://github.com/huggingface/text-generation-inference: router/src/lib.rs (shapes) and
router/src/validation.rs (rules and their messages).
Unknown members are ignored, as in TGI, and null means an absent member.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from secrets import randbits
from typing import Annotated, Any, Literal

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from app.api.json_codec import to_field_errors
from app.api.schema_parts import without_nul
from app.core.errors import FieldError, InvalidRequestError
from app.core.whole_numbers import WHOLE
from app.inference.prompts import PromptFormat
from app.inference.sampling import SamplingParameters
from app.results.requests import MAX_PROMPT_CHARACTERS

MAX_BEST_OF = 16
MAX_STOP_SEQUENCES = 16  # the engine's own bound is ours; TGI's default is 4
MAX_TOP_N_TOKENS = 5

UINT64 = 2**64
_SEED_BITS = 62  # of random seeds: best_of counts up from it, within 64 bits
_OURS = {"max_tokens": "max_new_tokens", "structured_outputs": "grammar"}  # names of parameters
_LENIENT = ConfigDict(extra="ignore", strict=True)


class Grammar(BaseModel):
    model_config = _LENIENT

    type: Literal["json", "regex", "json_schema"]
    value: JsonValue = Field(
        description="A JSON schema with `properties`, as an object or its text; a regular "
        "expression; or for `json_schema` an object that holds the schema as `schema`."
    )


class GenerateParameters(BaseModel):
    """Parameters of the generation. Their bounds are checked with TGI's messages."""

    model_config = _LENIENT

    best_of: Annotated[int, WHOLE] | None = Field(
        None,
        description=f"Generate this many texts, at most {MAX_BEST_OF}, and return the one with the "
        "highest cumulative log probability. Needs sampling; excludes `seed` and streams.",
    )
    temperature: float | None = Field(None, description="> 0; other than 1 it means sampling.")
    repetition_penalty: float | None = Field(None, description="> 0; 1 changes nothing.")
    frequency_penalty: float | None = Field(None, description="-2 to 2.")
    top_k: Annotated[int, WHOLE] | None = Field(None, description="> 0; means sampling.")
    top_p: float | None = Field(None, description="> 0 and < 1; means sampling.")
    typical_p: float | None = Field(None, description="Not supported.")
    do_sample: bool | None = Field(
        None, description="Default false; true if `parameters` is left out."
    )
    max_new_tokens: Annotated[int, WHOLE] | None = Field(
        None, description="> 0; default: the rest of the model's length, if known."
    )
    return_full_text: bool | None = Field(None, description="Put the prompt before the text.")
    stop: list[str] | None = Field(
        None,
        description=f"At most {MAX_STOP_SEQUENCES} texts that end the generation; the one that "
        "does is part of the generated text.",
    )
    truncate: Annotated[int, WHOLE] | None = Field(
        None, description="Keep this many of the prompt's last tokens."
    )
    watermark: bool | None = Field(None, description="Not supported.")
    details: bool | None = Field(None, description="Return tokens, seed and finish reason.")
    decoder_input_details: bool | None = Field(None, description="Not supported.")
    seed: Annotated[int, Field(ge=0, lt=UINT64), WHOLE] | None = Field(
        None,
        description="Makes sampling repeatable; random if left out, and returned in `details`.",
    )
    top_n_tokens: Annotated[int, WHOLE] | None = Field(
        None, description=f"0 to {MAX_TOP_N_TOKENS}: the most likely tokens at each place."
    )
    grammar: Grammar | None = None
    adapter_id: Annotated[str, Field(max_length=128)] | None = Field(
        None, description="Name of an adapter of the model (docs/lora.md)."
    )


class GenerateRequest(BaseModel):
    """A prompt, and how to continue it."""

    model_config = _LENIENT

    inputs: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    parameters: GenerateParameters | None = None
    model: str | None = Field(
        None, description="A model's name; default: the setting LLM_DEFAULT_MODEL."
    )
    reuse: bool | None = Field(
        None,
        description="This service's: a completed result of an equal request answers it (docs/reuse.md). "
        "It goes before the header X-Reuse.",
    )


class CompatGenerateRequest(GenerateRequest):
    """The same at `POST /`, where `stream` selects the kind of response."""

    stream: bool | None = None


class ChatMessage(BaseModel):
    """A chat message; only text parts are accepted."""

    model_config = _LENIENT

    role: str
    content: Annotated[str | list[dict[str, JsonValue]] | None, AfterValidator(without_nul)] = None
    name: str | None = None


class ChatTokenizeRequest(BaseModel):
    """Messages for the model's chat template, as in `/v1/chat/completions`."""

    model_config = _LENIENT

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000)]
    model: str | None = None
    tools: list[dict[str, JsonValue]] | None = None


@dataclass(slots=True, frozen=True)
class Generation:
    """A validated request: its parameters, and the model's prompt format."""

    inputs: str
    given: GenerateParameters
    is_sampling: bool
    format: PromptFormat | None
    max_tokens: int | None = None
    prompt_ids: Sequence[int] = ()

    @property
    def prefix(self) -> str:
        return self.inputs if self.given.return_full_text else ""


def is_sampling(given: GenerateParameters | None) -> bool:
    """Return whether tokens are sampled; otherwise the most likely one is taken.

    If `parameters` is absent, TGI samples. Otherwise it samples only if they request it or change the
    distribution: server/text_generation_server/utils/tokens.py, `NextTokenChooser`.
    """
    if given is None:
        return True
    return bool(
        given.do_sample
        or given.temperature not in (None, 1.0)
        or given.top_k is not None
        or given.top_p is not None
    )


def check(request: GenerateRequest, *, is_stream: bool) -> GenerateParameters:
    given = request.parameters or GenerateParameters()
    for fault in _faults(request, given, is_stream=is_stream):
        raise InvalidRequestError(fault)
    for name in ("watermark", "typical_p", "decoder_input_details"):
        if getattr(given, name):
            raise InvalidRequestError(f"`{name}` is not supported: the backend cannot do it")
    return given


def _faults(
    request: GenerateRequest, given: GenerateParameters, *, is_stream: bool
) -> Iterable[str]:
    """Violations, in the order of TGI's checks."""
    if is_stream and given.best_of not in (None, 1):
        yield "`best_of` != 1 is not supported when streaming tokens"
    if is_stream and given.decoder_input_details:
        yield "`decoder_input_details` == true is not supported when streaming tokens"
    best_of = 1 if given.best_of is None else given.best_of
    if not 0 < best_of <= MAX_BEST_OF:
        yield f"`best_of` must be > 0 and <= {MAX_BEST_OF}. Given: {best_of}"
    if best_of > 1 and not _requests_sampling(request):
        yield "you must use sampling when `best_of` is > 1"
    yield from _number_faults(given)
    if len(given.stop or ()) > MAX_STOP_SEQUENCES:
        yield (
            f"`stop` supports up to {MAX_STOP_SEQUENCES} stop sequences. "
            f"Given: {len(given.stop or ())}"
        )
    if best_of > 1 and given.seed is not None:
        yield "`seed` must not be set when `best_of` > 1"
    if not 0 <= (given.top_n_tokens or 0) <= MAX_TOP_N_TOKENS:
        yield (
            f"`top_n_tokens` must be >= 0 and <= {MAX_TOP_N_TOKENS}. Given: {given.top_n_tokens}"
        )
    if not request.inputs:
        yield "`inputs` cannot be empty"


def _requests_sampling(request: GenerateRequest) -> bool:
    given = request.parameters
    if given is None or given.do_sample:
        return True
    return any(
        value is not None
        for value in (given.temperature, given.top_k, given.top_p, given.typical_p)
    )


def _number_faults(given: GenerateParameters) -> Iterable[str]:
    for name in ("temperature", "repetition_penalty"):
        value = getattr(given, name)
        if value is not None and not value > 0:
            yield f"`{name}` must be strictly positive"
    if given.frequency_penalty is not None and not -2 <= given.frequency_penalty <= 2:
        yield "`frequency_penalty` must be >= -2.0 and <= 2.0"
    for name in ("top_p", "typical_p"):
        value = getattr(given, name)
        if value is not None and not 0 < value < 1:
            yield f"`{name}` must be > 0.0 and < 1.0"
    for name in ("top_k", "max_new_tokens"):
        value = getattr(given, name)
        if value is not None and not value > 0:
            yield f"`{name}` must be strictly positive"


def check_length(given: GenerateParameters, tokens: int, most: int) -> None:
    asked = given.max_new_tokens
    if asked is not None and tokens + asked > most:
        raise InvalidRequestError(
            f"`inputs` tokens + `max_new_tokens` must be <= {most}. "
            f"Given: {tokens} `inputs` tokens and {asked} `max_new_tokens`"
        )
    if tokens >= most:
        raise InvalidRequestError(f"`inputs` must have less than {most} tokens. Given: {tokens}")


def choose_seed(given: GenerateParameters, idempotency_key: str | None) -> int:
    """The seed of a sampling request.

    A repeated request under the same key must be the same request: its seed is derived from the key.
    """
    if given.seed is not None:
        return given.seed
    if idempotency_key is None:
        return randbits(_SEED_BITS)
    digest = sha256(idempotency_key.encode()).digest()
    return int.from_bytes(digest[:8], "big") >> (64 - _SEED_BITS)


def to_sampling(generation: Generation, seed: int, *, with_tokens: bool) -> SamplingParameters:
    given, draws = generation.given, generation.is_sampling
    members = {
        "max_tokens": generation.max_tokens,
        "temperature": (given.temperature or 1.0) if draws else 0.0,
        "top_k": given.top_k,
        "top_p": given.top_p,
        "repetition_penalty": given.repetition_penalty,
        "frequency_penalty": given.frequency_penalty,
        "stop": given.stop or None,
        # TGI's generated text ends with the text that stopped it.
        "include_stop_str_in_output": True if given.stop else None,
        "seed": (seed if seed < UINT64 // 2 else seed - UINT64) if draws else None,
        "logprobs": (given.top_n_tokens or 0) if with_tokens else None,
        "structured_outputs": _to_structure(given.grammar) if given.grammar else None,
    }
    try:
        return SamplingParameters.model_validate(members)
    except ValidationError as error:
        wrong = [
            FieldError(_OURS.get(one.field, one.field), one.message)
            for one in to_field_errors(error.errors())
        ]
        raise InvalidRequestError("The parameters are not valid.", wrong) from error


def _to_structure(grammar: Grammar) -> dict[str, JsonValue]:
    value = grammar.value
    if grammar.type == "regex":
        if not isinstance(value, str):
            raise InvalidRequestError("grammar is not valid: a regex must be a string")
        return {"regex": value}
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except ValueError as error:
            raise InvalidRequestError(f"grammar is not valid: {error}") from error
    if grammar.type == "json_schema" and isinstance(value, dict):
        value = value.get("schema")
    if not isinstance(value, dict):
        raise InvalidRequestError("grammar is not valid: a JSON schema must be an object")
    if "properties" not in value:
        raise InvalidRequestError("grammar is not valid: Grammar must have a 'properties' field")
    return {"json": value}


def to_messages(request: ChatTokenizeRequest) -> list[dict[str, Any]]:
    messages = []
    for message in request.messages:
        content = message.content
        if isinstance(content, list):
            if any(part.get("type") != "text" for part in content):
                raise InvalidRequestError("messages: parts other than `text` are not supported")
            content = "".join(str(part.get("text", "")) for part in content)
        named = {} if message.name is None else {"name": message.name}
        messages.append({"role": message.role, "content": content or ""} | named)
    return messages
