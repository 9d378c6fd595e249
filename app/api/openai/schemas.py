"""Shared schemas of OpenAI's chat and text completions: sampling, log probabilities, usage, frames.

https://platform.openai.com/docs/api-reference. Further members are those of vLLM's own server
(https://docs.vllm.ai/en/latest/serving/openai_compatible_server/).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self
from uuid import UUID

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from app import __version__
from app.api.errors.openai_errors import error_body
from app.api.json_codec import to_field_errors
from app.api.refused_sampling import RefusedSampling
from app.api.schema_parts import Refused, value_error
from app.core.errors import InvalidRequestError, ServiceError, invalid_field
from app.core.ids import unix_seconds
from app.core.whole_numbers import WHOLE
from app.inference.sampling import MAX_TOKENS, Penalty, SamplingParameters, StopTexts, TokenId
from app.inference.structured_outputs import StructuredOutputs
from app.results.requests import SendOptions
from app.results.rows import ResultRow

SYSTEM_FINGERPRINT = f"llm-api-service-{__version__}"
MAX_CHOICES = 128
MAX_ROWS = 1000  # results of one request
DONE = b"data: [DONE]\n\n"
_INT64 = 2**63

_Float = Field(allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = Field(
        None, description="Add a last chunk with empty `choices` and the usage."
    )
    continuous_usage_stats: Refused = Field(None, description="Not supported.")


class OpenAIRequest(RefusedSampling):
    """Members of both requests; unknown ones are ignored, as OpenAI's clients expect."""

    model_config = ConfigDict(strict=True, extra="ignore", protected_namespaces=())

    model: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None,
        description="A model's name; default: the setting LLM_DEFAULT_MODEL, or the only one that "
        "is ready.",
    )
    temperature: Annotated[float, _Float, Field(ge=0, le=2)] | None = Field(
        None, description="0 is greedy; the default is 1."
    )
    top_p: Annotated[float, _Float, Field(gt=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None, description="Choices of each prompt; each is a result of its own."
    )
    stop: StopTexts | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64), WHOLE] | None = Field(
        None, description="Seed of the first choice; each further choice has the next number."
    )
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Ignored.")
    metadata: dict[str, JsonValue] | None = Field(None, description="Kept with the results.")
    store: bool | None = None

    top_k: Annotated[int, Field(ge=-1, le=1_000_000), WHOLE] | None = Field(
        None, description="vLLM's."
    )
    min_p: Annotated[float, _Float, Field(ge=0, le=1)] | None = Field(None, description="vLLM's.")
    repetition_penalty: Annotated[float, _Float, Field(gt=0, le=100)] | None = Field(
        None, description="vLLM's."
    )
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description="vLLM's."
    )
    ignore_eos: bool | None = Field(None, description="vLLM's.")
    stop_token_ids: Annotated[list[TokenId], Field(max_length=256)] | None = Field(
        None, description="vLLM's."
    )
    bad_words: list[str] | None = Field(None, description="vLLM's.")
    allowed_token_ids: list[Annotated[int, WHOLE]] | None = Field(None, description="vLLM's.")
    include_stop_str_in_output: bool | None = Field(None, description="vLLM's.")
    skip_special_tokens: bool | None = Field(None, description="vLLM's.")
    spaces_between_special_tokens: bool | None = Field(None, description="vLLM's.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = Field(
        None,
        description="vLLM's: this many likely tokens per token of the prompt; not in a stream.",
    )
    priority: Annotated[int, WHOLE] | None = Field(
        None,
        description="vLLM's: larger values run later; below 0 only with a token that allows it.",
    )
    reuse: bool | None = Field(
        None,
        description="This service's: a completed result of an equal request answers it (docs/reuse.md).",
    )
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's.")
    guided_json: JsonValue = Field(None, description="vLLM's older name of structured_outputs.")
    guided_regex: JsonValue = None
    guided_choice: JsonValue = None
    guided_grammar: JsonValue = None
    guided_whitespace_pattern: Refused = Field(None, description="Not supported.")

    use_beam_search: Refused = Field(None, description="Not supported.")
    truncate_prompt_tokens: Refused = Field(None, description="Not supported.")
    logits_processors: Refused = Field(None, description="Not supported.")
    return_tokens_as_token_ids: Refused = Field(None, description="Not supported.")
    return_token_ids: Refused = Field(None, description="Not supported.")
    add_special_tokens: Refused = Field(None, description="Not supported: the model's own are.")
    logprob_token_ids: Refused = Field(None, description="Not supported.")
    thinking_token_budget: Refused = Field(None, description="Not supported.")
    prompt_embeds: Refused = Field(None, description="Not supported.")
    vllm_xargs: Refused = Field(None, description="Not supported.")
    repetition_detection: Refused = Field(None, description="Not supported.")

    @model_validator(mode="after")
    def _streams_no_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise value_error("prompt_logprobs cannot be streamed")
        return self

    def heading(self, result_id: UUID, prefix: str, kind: str) -> dict[str, Any]:
        """The first members of a response, and of each of its chunks."""
        return {
            "id": f"{prefix}-{result_id}",
            "object": kind,
            "created": int(unix_seconds(result_id)),
            "model": self.model,
            "system_fingerprint": SYSTEM_FINGERPRINT,
        }

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def to_options(self, given: dict[str, Any]) -> SendOptions:
        """Options of the results; `given` are further sampling parameters.

        Raises InvalidRequestError.
        """
        names = self.model_fields_set & _SAMPLING
        sampling = {name: value for name in names if (value := getattr(self, name)) is not None}
        structured = self._structured_outputs()
        if structured is not None:
            if "structured_outputs" in given:
                raise invalid_field(
                    "structured_outputs", "cannot be combined with response_format or a forced tool"
                )
            sampling["structured_outputs"] = structured
        options: dict[str, Any] = {}
        try:
            options["parameters"] = SamplingParameters(**sampling | given)
            if self.metadata is not None:
                options["metadata"] = self.metadata
            if self.priority is not None:
                options["priority"] = -self.priority
            if self.reuse is not None:
                options["reuse"] = self.reuse
            return SendOptions(**options)
        except ValidationError as error:
            fields = to_field_errors(error.errors())
            raise InvalidRequestError(f"{fields[0].field}: {fields[0].message}.", fields) from error

    def _structured_outputs(self) -> Any:
        found: dict[str, Any] = {}
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs
        for name in self.model_fields_set & _GUIDED.keys():
            if (value := getattr(self, name)) is not None:
                found[name] = {_GUIDED[name]: value}
        if len(found) > 1:
            raise invalid_field("structured_outputs", "give one constraint, not several")
        return next(iter(found.values()), None)


_SAMPLING = frozenset(OpenAIRequest.model_fields) & SamplingParameters.model_fields.keys() - {
    "n",
    "structured_outputs",
}
_GUIDED = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}


class OpenAIError(BaseModel):
    message: str
    type: str
    param: str | None = Field(description="The first wrong member of the request.")
    code: str | None = Field(description="For programs: OpenAI's code, or one of docs/errors.md.")


class OpenAIErrorRead(BaseModel):
    error: OpenAIError


def usage_of(
    rows: Sequence[ResultRow], n: int, reasoning_tokens: int | None = None
) -> dict[str, Any] | None:
    """Tokens of all choices, each prompt's once; None if the engine did not count them."""
    prompts = [row.prompt_tokens for row in rows[::n] if row.prompt_tokens is not None]
    completions = [row.completion_tokens for row in rows if row.completion_tokens is not None]
    if len(prompts) < len(rows[::n]) or len(completions) < len(rows):
        return None
    prompt, completion = sum(prompts), sum(completions)
    usage: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }
    if reasoning_tokens is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning_tokens}
    return usage


def answer_to_wire(
    heading: dict[str, Any],
    choices: list[dict[str, Any]],
    rows: Sequence[ResultRow],
    n: int,
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """The response to a request; `n` results belong to each prompt."""
    usage = usage_of(rows, n, reasoning_tokens)
    return heading | {"choices": choices} | ({} if usage is None else {"usage": usage})


def sampled_of(token: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    entries = iter(token.values())
    first = next(entries)
    return first if "sampled" in first else next((e for e in entries if "sampled" in e), first)


def likeliest(token: Mapping[str, dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The `count` most likely entries, best first."""
    known = [entry for entry in token.values() if entry["rank"] and entry["rank"] <= count]
    return sorted(known, key=lambda entry: int(entry["rank"]))


class Frames(ABC):
    """Encoder of a stream's chunks, whose constant parts are encoded once.

    Places are those of the results in their group; `n` results belong to each prompt.
    """

    _AROUND_TEXT: ClassVar[tuple[bytes, bytes]]  # within a choice

    def __init__(
        self, heading: dict[str, Any], request: OpenAIRequest, ids: Sequence[UUID], n: int
    ) -> None:
        self._ids = ids
        self._n = n
        self._reasoning_tokens: int | None = None  # of the choices that have ended
        self._head = b"data: %b," % orjson.dumps(heading)[:-1]
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"
        before, behind = self._AROUND_TEXT
        self._before_text = [
            self._head + b'"choices":[{"index":%d,' % place + before for place in range(len(ids))
        ]
        self._behind_text = behind + b',"logprobs":null,"finish_reason":null}]' + self._tail

    @abstractmethod
    def begin(self) -> bytes: ...

    @abstractmethod
    def delta(self, place: int, text: str, tokens: Sequence[Any]) -> bytes: ...

    @abstractmethod
    def end(self, place: int, row: ResultRow) -> bytes:
        """The last chunk of a choice: its finish reason."""

    def usage(self, rows: Sequence[ResultRow]) -> bytes:
        usage = usage_of(rows, self._n, self._reasoning_tokens)
        members = orjson.dumps({"choices": [], "usage": usage})
        return self._head + members[1:] + b"\n\n"

    def _encode(self, choice: dict[str, Any]) -> bytes:
        return self._head + b'"choices":[' + orjson.dumps(choice) + b"]" + self._tail


def error_frame(error: ServiceError) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(error_body(error))
