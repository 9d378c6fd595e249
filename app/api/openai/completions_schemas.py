"""OpenAI's text completions: prompts to results, and back to choices and chunks.

https://platform.openai.com/docs/api-reference/completions
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self
from uuid import UUID

import orjson
from pydantic import AfterValidator, Field, PlainValidator, model_validator

from app.api.logprobs import encoded, logprob_of
from app.api.openai.response_format import ResponseFormat
from app.api.openai.schemas import (
    MAX_CHOICES,
    MAX_ROWS,
    Frames,
    OpenAIRequest,
    answer_to_wire,
    likeliest,
    sampled_of,
)
from app.api.schema_parts import Refused, value_error
from app.core.errors import ModelNotReadyError
from app.core.whole_numbers import WHOLE, to_whole
from app.inference.sampling import MAX_TOKENS
from app.results.requests import MAX_PROMPT_CHARACTERS, SendOptions
from app.results.rows import ResultRow

DEFAULT_MAX_TOKENS = 16  # OpenAI's own
TokenIds = list[int]


def _refuse_false(value: bool) -> bool:
    if not value:
        raise value_error("false is not supported: the engine adds the model's special tokens")
    return value


def _read_prompts(value: Any) -> list[str | TokenIds]:
    if isinstance(value, str) or (
        isinstance(value, list) and value and isinstance(value[0], (int, float))
    ):
        value = [value]
    if not isinstance(value, list) or not value:
        raise value_error("must be a text, a list of texts, or lists of token ids")
    if len(value) > MAX_ROWS:
        raise value_error(f"must have at most {MAX_ROWS} texts")
    for one in value:
        if isinstance(one, list) and one:
            one[:] = map(to_whole, one)
            if not all(type(token) is int and 0 <= token < 2**31 for token in one):
                raise value_error("token ids must be whole numbers of at least 0")
        elif not isinstance(one, str) or not 0 < len(one) <= MAX_PROMPT_CHARACTERS:
            raise value_error(f"must have texts of 1 to {MAX_PROMPT_CHARACTERS} characters")
    return value


Prompts = Annotated[
    list[str | TokenIds],
    PlainValidator(
        _read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]
    ),
]


class CompletionRequest(OpenAIRequest):
    """Texts to continue."""

    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WHOLE] | None = Field(
        None, description=f"The default is {DEFAULT_MAX_TOKENS}; 0 only with echo."
    )
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = Field(
        None, description="Generate this many, return the `n` most likely."
    )
    echo: bool | None = Field(None, description="The prompt before its text.")
    logprobs: Annotated[int, Field(ge=0, le=5), WHOLE] | None = None
    add_special_tokens: Annotated[bool, AfterValidator(_refuse_false)] | None = Field(
        None, description="vLLM's; only true, its default."
    )
    suffix: Refused = Field(None, description="Not supported.")
    response_format: ResponseFormat = Field(None, description="vLLM's, as in chats.")

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.stream and self.is_scored:
            raise value_error("echo cannot be streamed with logprobs")
        if self.max_tokens == 0 and (not self.echo or self.stream):
            raise value_error("max_tokens can be 0 only with echo, and not in a stream")
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise value_error("best_of must be at least n")
            if self.stream and self.best_of > (self.n or 1):
                raise value_error("best_of cannot be streamed: only the end shows which is best")
        if len(self.prompt) * self.rows_per_prompt > MAX_ROWS:
            raise value_error(f"prompts times n or best_of must be at most {MAX_ROWS}")
        return self

    @property
    def is_scored(self) -> bool:
        """True if the log probabilities are those of the prompt too."""
        return bool(self.echo) and self.logprobs is not None

    @property
    def rows_per_prompt(self) -> int:
        return self.best_of or self.n or 1

    def to_send_options(self) -> SendOptions:
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        # The engine generates at least one token, which an echo alone leaves out.
        given: dict[str, Any] = {"max_tokens": max_tokens or 1}
        if self.is_scored and self.prompt_logprobs is None:
            given["prompt_logprobs"] = self.logprobs
        if self.logprobs is not None:
            given["logprobs"] = self.logprobs
        elif self.rows_per_prompt > (self.n or 1):
            given["logprobs"] = 0  # of the sampled tokens, to rank by
        if self.response_format is not None:
            given["structured_outputs"] = self.response_format
        return self.to_options(given)


@dataclass(slots=True, frozen=True)
class PromptText:
    """A prompt as it is echoed, and the text of its first token where that is known."""

    text: str
    first_token: str = ""
    content: str | None = None  # as it is sent, if that differs: the engine adds its first token
    token_ids: TokenIds | None = None  # for the engine, if its tokenizer makes others of the text


def completion(
    request: CompletionRequest, prompts: Sequence[PromptText], rows: Sequence[ResultRow]
) -> dict[str, Any]:
    choices = [
        _choice(request, prompt, place, row)
        for place, (prompt, row) in enumerate(_chosen(request, prompts, rows))
    ]
    heading = request.heading(rows[0].id, "cmpl", "text_completion")
    return answer_to_wire(heading, choices, rows, request.rows_per_prompt)


def _chosen(
    request: CompletionRequest, prompts: Sequence[PromptText], rows: Sequence[ResultRow]
) -> list[tuple[PromptText, ResultRow]]:
    """The results to return: the most likely `n` of each prompt."""
    count, n = request.rows_per_prompt, request.n or 1
    chosen = []
    for place, prompt in enumerate(prompts):
        own = list(rows[place * count : (place + 1) * count])
        if count > n:
            own = sorted(own, key=_likelihood, reverse=True)[:n]
        chosen += [(prompt, row) for row in own]
    return chosen


def _likelihood(row: ResultRow) -> float:
    tokens = row.token_logprobs()
    return float(sum(logprob_of(sampled_of(token)) for token in tokens if token))


def _choice(
    request: CompletionRequest, prompt: PromptText, place: int, row: ResultRow
) -> dict[str, Any]:
    is_prompt_alone = request.max_tokens == 0
    text = "" if is_prompt_alone else row.text
    logprobs = None
    if request.logprobs is not None:
        writer = _Logprobs(request.logprobs)
        if request.is_scored:
            writer.add_prompt(prompt, row)
        logprobs = encoded(writer.next(() if is_prompt_alone else row.token_logprobs()))
    choice = {
        "index": place,
        "text": prompt.text + text if request.echo else text,
        "logprobs": logprobs,
        "finish_reason": row.finish_reason,
    }
    if row.prompt_logprobs is not None:
        choice["prompt_logprobs"] = orjson.Fragment(row.prompt_logprobs)
    return choice


class _Logprobs:
    """OpenAI's older form of log probabilities; offsets are those of the tokens' own texts, as in vLLM."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._offset = 0
        self._begin()

    def _begin(self) -> None:
        self._wire: dict[str, list[Any]] = {
            "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": [],
        }  # fmt: skip

    def add_prompt(self, prompt: PromptText, row: ResultRow) -> None:
        """Add the prompt's tokens. The first one has no log probability.

        Raises ModelNotReadyError if the row has none: a worker of an older version ran it.
        """
        if not (positions := row.prompt_token_logprobs()):
            raise ModelNotReadyError(
                f"Result {row.id} has no log probabilities of its prompt: a worker of an older version "
                "ran it. Send it again once all workers are upgraded."
            )
        self._add(prompt.first_token, None, None)
        for entries in map(list, map(dict.values, positions[1:])):
            top = {one["decoded_token"]: logprob_of(one) for one in entries[: self._count + 1]}
            self._add(entries[0]["decoded_token"] or "", logprob_of(entries[0]), top)

    def next(self, tokens: Sequence[Mapping[str, dict[str, Any]]]) -> dict[str, Any]:
        for token in tokens:
            if not token:
                continue
            sampled = sampled_of(token)
            text = sampled["decoded_token"] or ""
            entries = [*likeliest(token, self._count), sampled]
            top = {entry["decoded_token"]: logprob_of(entry) for entry in entries}
            self._add(text, logprob_of(sampled), top)
        wire = self._wire
        self._begin()
        return wire

    def _add(self, text: str, logprob: float | None, top: dict[str, float] | None) -> None:
        self._wire["tokens"].append(text)
        self._wire["token_logprobs"].append(logprob)
        self._wire["top_logprobs"].append(top)
        self._wire["text_offset"].append(self._offset)
        self._offset += len(text)


class CompletionFrames(Frames):
    _AROUND_TEXT = b'"text":', b""

    def __init__(
        self, request: CompletionRequest, prompts: Sequence[str], ids: Sequence[UUID]
    ) -> None:
        heading = request.heading(ids[0], "cmpl", "text_completion")
        super().__init__(heading, request, ids, request.rows_per_prompt)
        self._echoed = [one for one in prompts for _ in range(self._n)] if request.echo else []
        self._logprobs = None
        if request.logprobs is not None:
            self._logprobs = [_Logprobs(request.logprobs) for _ in ids]

    def begin(self) -> bytes:
        return b"".join(self.delta(place, text, ()) for place, text in enumerate(self._echoed))

    def delta(self, place: int, text: str, tokens: Sequence[Any]) -> bytes:
        if self._logprobs is not None:
            return self._chunk(place, text, self._logprobs[place].next(tokens), None)
        return self._before_text[place] + orjson.dumps(text) + self._behind_text

    def end(self, place: int, row: ResultRow) -> bytes:
        return self._chunk(place, "", None, row.finish_reason)

    def _chunk(self, place: int, text: str, logprobs: Any, finish_reason: str | None) -> bytes:
        choice = {
            "index": place,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        return self._encode(choice)
