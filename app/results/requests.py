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
from app.inference.sampling import SamplingParameters
from app.infini_gram.attribution import AttributionParameters

MAX_METADATA_BYTES = 16_384
MAX_PROMPT_CHARACTERS = 2_000_000
MAX_URL_CHARACTERS = 2_048

_STRICT = ConfigDict(extra="forbid", strict=True)

# Control characters are excluded: a key is printed in logs and problems.
Key = Annotated[str, Field(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
Prompt = Annotated[str, Field(min_length=1, max_length=MAX_PROMPT_CHARACTERS)]
Metadata = Annotated[dict[str, JsonValue], Field(max_length=64)]


class Message(BaseModel):
    """One chat message."""

    model_config = _STRICT

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]


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
    priority: Annotated[int, Field(ge=-100, le=100)] = Field(
        0,
        description="Below 0 lets other results go first; above 0 goes first itself, as far as the "
        "token's `max_priority` allows.",
    )
    deadline_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Fail if not finished by then; default 24 h, at most 7 days."
    )
    webhook_url: Annotated[str, Field(max_length=MAX_URL_CHARACTERS)] | None = Field(
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
