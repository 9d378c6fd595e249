"""Requests to save a prompt and to send one, as every dialect makes them."""

import json
from typing import Annotated, Any, Self
from uuid import UUID

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from app.core.settings.fields import MAX_RETAIN_SECONDS, MIN_RETAIN_SECONDS
from app.core.whole_numbers import WHOLE
from app.inference.images import Images
from app.inference.pooling import EmbeddingParameters, ScoreParameters
from app.inference.sampling import SamplingParameters
from app.infini_gram.attribution import AttributionParameters

MAX_METADATA_BYTES = 16_384
MAX_PROMPT_CHARACTERS = 2_000_000
MAX_URL_CHARACTERS = 2_048
MAX_TOTAL = 10**12
MAX_RETRIES = 200
MAX_KEYS = 1_000

_STRICT = ConfigDict(extra="forbid", strict=True)

# Control characters are excluded: a key is printed in logs and problems.
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
Metadata = Annotated[dict[str, JsonValue], Field(max_length=64)]
Priority = Annotated[int, Field(ge=-100, le=100), WHOLE]
Deadline = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Url = Annotated[str, Field(max_length=MAX_URL_CHARACTERS)]


class Message(BaseModel):
    """One chat message."""

    model_config = _STRICT

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    images: Images | None = Field(
        None, description="For models with vision (docs/vision.md); they stand before the text."
    )

    @model_validator(mode="after")
    def _has_places(self) -> Self:
        if any(one.after > len(self.content) for one in self.images or ()):
            raise ValueError("images: `after` exceeds the length of the content")
        return self


Messages = Annotated[list[Message], Field(min_length=1, max_length=10_000)]


class _WithMetadata(BaseModel):
    model_config = _STRICT

    metadata: Metadata = Field(
        default_factory=dict, description="Kept and returned; at most 16 KiB as JSON."
    )

    @field_validator("metadata")
    @classmethod
    def _bounded_metadata(cls, metadata: dict[str, JsonValue]) -> dict[str, JsonValue]:
        try:
            json.dumps(metadata, allow_nan=False)  # orjson would write null
            size = len(orjson.dumps(metadata))
        except (ValueError, TypeError) as error:
            raise ValueError("numbers must be finite, and integers must fit 64 bits") from error
        if size > MAX_METADATA_BYTES:
            raise ValueError(f"must not exceed {MAX_METADATA_BYTES} bytes as JSON")
        return metadata


class ContextCreate(_WithMetadata):
    """A prompt to save: plain `content` or chat `messages`."""

    content: Prompt | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.content is None) == (self.messages is None):
            raise ValueError("give either content or messages")
        return self


def _named_index(value: object) -> object:
    return {"index": value} if isinstance(value, str) else value


class AttributeOptions(AttributionParameters):
    """The index of an attribution, and its parameters."""

    index: Annotated[str, Field(min_length=1, max_length=128)]

    def to_stored(self) -> dict[str, Any]:
        """The parameters that differ from their defaults."""
        return self.model_dump(by_alias=True, exclude_defaults=True, exclude={"index"})


class SendOptions(_WithMetadata):
    """Options of a submission; every member is optional."""

    parameters: SamplingParameters = Field(default_factory=SamplingParameters)
    embedding: EmbeddingParameters | None = Field(
        None,
        description="Compute the vector of the text, and generate nothing: a result of the kind "
        "`embedding` (docs/embeddings.md).",
    )
    score: ScoreParameters | None = Field(
        None,
        description="Compute the score of a message of the role `query` with each of the role "
        "`document` behind it: a result of the kind `score` (docs/embeddings.md).",
    )
    priority: Priority = Field(
        0,
        description="Below 0 lets other results go first; above 0 goes first itself, as far as the "
        "token's `max_priority` allows.",
    )
    deadline_seconds: Deadline | None = Field(
        None, description="Fail if not finished by then; default 24 h, at most 7 days."
    )
    webhook_url: Url | None = Field(
        None, description="Called when the result is terminal; see /webhooks/deliveries."
    )
    attribute: Annotated[
        AttributeOptions | None,
        BeforeValidator(_named_index, json_schema_input_type=AttributeOptions | str | None),
    ] = Field(
        None,
        description="An index's name, or `{index, ...parameters}`: once completed, the text is "
        "attributed to that corpus, by a result of its own that `attribution` names.",
        strict=False,
    )
    retain_seconds: (
        Annotated[float, Field(ge=MIN_RETAIN_SECONDS, le=MAX_RETAIN_SECONDS, allow_inf_nan=False)]
        | None
    ) = Field(
        None,
        description="Delete the result so long after its end; at most as long as the team's are kept.",
    )
    reuse: bool | None = Field(
        None,
        description="True: a completed result of an equal request answers this one, if there is one "
        "(docs/reuse.md). Needs a temperature of 0 or a seed; otherwise it has no effect. False: the "
        "request runs. Default: the team's setting.",
    )
    continue_lost_attempts: bool | None = Field(
        None,
        description="False: an attempt after a lost one starts over. Otherwise it continues the text "
        "where the parameters allow it and LLM_CONTINUE_LOST_ATTEMPTS is on (docs/continuation.md).",
    )
    idempotency_key: Key | None = Field(
        None,
        description="The same key and body again return the first result, another body 409. The "
        "header `Idempotency-Key` does the same for a request that is not a list.",
    )
    job_id: Annotated[UUID, Field(strict=False)] | None = Field(
        None, description="Make the result a row of this job, under its `job_key`."
    )
    job_key: Key | None = Field(
        None,
        description="Key of the row, unique in its job: as long as the job lives, the same key and body "
        "again return the row's result, another body 409.",
    )

    @model_validator(mode="after")
    def _whole_row(self) -> Self:
        if (self.job_id is None) != (self.job_key is None):
            raise ValueError("give both job_id and job_key, or neither")
        if self.job_key is not None and self.idempotency_key is not None:
            raise ValueError("a row of a job has its job_key, and no idempotency_key")
        return self

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        if self.pooling is None:
            return self
        if self.embedding is not None and self.score is not None:
            raise ValueError("give embedding or score, not both")
        if self.attribute is not None or self.parameters.model_fields_set:
            raise ValueError("embedding and score generate no text: they take no parameters of it")
        return self

    @property
    def pooling(self) -> EmbeddingParameters | ScoreParameters | None:
        """The parameters of a request that generates no text."""
        return self.embedding or self.score


class ResultCreate(SendOptions):
    """A prompt and how to send it, in one call."""

    model: Annotated[str, Field(min_length=1, max_length=256)]
    content: Prompt | None = None
    messages: Messages | None = None
    context_id: Annotated[UUID, Field(strict=False)] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [self.content, self.messages, self.context_id]
        if sum(source is not None for source in given) != 1:
            raise ValueError("give exactly one of content, messages and context_id")
        return self


class JobCreate(_WithMetadata):
    """A job to create; every member is optional."""

    name: Annotated[str, Field(max_length=255)] = ""
    key: Key | None = Field(
        None, description="As long as the job lives, the same key again returns the job."
    )
    total: Annotated[int, Field(ge=0, le=MAX_TOTAL), WHOLE] | None = Field(
        None, description="Rows that the client expects to send; only kept and returned."
    )
    priority: Priority = Field(
        -1,
        description="Priority of its rows, unless they have their own; by default others go first.",
    )
    deadline_seconds: Deadline | None = Field(
        None, description="Deadline of each of its rows from its acceptance, unless it has its own."
    )
    webhook_url: Url | None = Field(
        None, description="Called when the job has ended; see /webhooks/deliveries."
    )


class JobRetry(BaseModel):
    """A batch of failed rows to send again; every member is optional."""

    model_config = _STRICT

    after: Annotated[int, Field(ge=0, lt=2**63), WHOLE] = Field(
        0, description="`following` of the previous batch."
    )
    until: Annotated[int, Field(ge=0, lt=2**63), WHOLE] | None = Field(
        None,
        description="Only rows up to this place: the job's `last_place` before the first batch.",
    )
    limit: Annotated[int, Field(ge=1, le=MAX_RETRIES), WHOLE] = MAX_RETRIES
    error_code: Annotated[str, Field(max_length=64, pattern=r"^[^\x00]*$")] | None = Field(
        None, description="Only rows that failed with it."
    )


class JobKeys(BaseModel):
    """Keys of rows to read."""

    model_config = _STRICT

    keys: Annotated[list[Key], Field(min_length=1, max_length=MAX_KEYS)]
