"""Requests on their way to a result: what clients ask for, and the checks that need no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import orjson

from app.core.errors import FieldError, InvalidRequestError
from app.core.settings import Settings
from app.core.url_guard import url_fault, webhook_rules
from app.inference.adapters import ADAPTER_PARAMETER
from app.inference.images import IMAGES
from app.inference.model_registry import Model
from app.queue.enqueue import NewContext, OnDisconnect
from app.results.plain_contexts import TextSize
from app.results.requests import SendOptions


@dataclass(slots=True, frozen=True)
class Prompt:
    """A new prompt: text, or messages with the other arguments of the model's template."""

    content: str | None = None
    messages: list[dict[str, Any]] | None = None
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    token_ids: Sequence[int] | None = None  # `content` as the engine reads it


@dataclass(slots=True, frozen=True)
class GroupRequest:
    """`n` choices of each prompt, in this order; a seed counts up from the first choice."""

    model: str
    prompts: Sequence[Prompt]
    options: SendOptions = field(default_factory=SendOptions)
    n: int = 1
    on_disconnect: OnDisconnect = "cancel"
    request: str | None = None  # the dialect's own request as JSON text, to render the result later
    store: bool = True  # False: the texts are erased once they are delivered
    waits_for_model: bool = False  # False: refused while the model is not ready
    cuts_max_tokens: bool = False  # to what the model's length leaves; False: refused

    @property
    def size(self) -> int:
        return len(self.prompts) * self.n


@dataclass(slots=True, frozen=True)
class SubmissionDraft:
    id: UUID
    model: Model
    context_id: UUID
    content: str | None  # the context's text; None where nothing depends on it
    prompt: str | None  # the context's messages, rendered by the model's template
    options: SendOptions
    new_context: NewContext | None = None  # None: the context is stored already
    stored_size: TextSize | None = None  # of a stored text that is not read
    token_ids: Sequence[int] | None = None  # of a prompt that is sent as tokens
    images: Mapping[str, int] | None = None  # of its messages: `measure_images`
    cuts_max_tokens: bool = False  # to what the model's length leaves

    @property
    def text(self) -> str:
        """The prompt as the model reads it."""
        return self.prompt if self.prompt is not None else self.content or ""

    @property
    def image_tokens(self) -> int:
        """Tokens of the prompt that its text does not have; 0 where they are unknown."""
        return (self.images or {}).get("tokens", 0)

    @property
    def size(self) -> TextSize:
        """The size of the prompt as the model reads it."""
        return self.stored_size or TextSize(len(self.text), len(self.text.encode()))


def validate(
    options: SendOptions, settings: Settings, *, max_priority: int, max_retain_seconds: float | None
) -> None:
    """Raise InvalidRequestError for the first option beyond a bound of the service, token or team."""
    deadline = options.deadline_seconds or settings.default_deadline_seconds
    if deadline > settings.max_deadline_seconds:
        raise invalid(
            "deadline_seconds",
            f"must be at most {settings.max_deadline_seconds:.0f} (LLM_MAX_DEADLINE_SECONDS)",
        )
    if options.priority > max_priority:
        raise invalid("priority", f"must be at most {max_priority}, the token's max_priority")
    if options.webhook_url is not None:
        rules = webhook_rules(allow_private=settings.webhook_allow_private)
        fault = url_fault(options.webhook_url, rules)
        if fault:
            raise invalid("webhook_url", fault)
    if "grammar" in (options.parameters.structured_outputs or {}) and not settings.ebnf_grammars:
        raise invalid(
            "parameters.structured_outputs.grammar",
            "is off (LLM_EBNF_GRAMMARS): use `json`, `regex` or `choice`, or ask the operator to turn it on",
        )
    most = max_retain_seconds
    if options.retain_seconds is not None and most is not None and options.retain_seconds > most:
        raise invalid("retain_seconds", f"must be at most {most:.0f}, as your team's results")


def check_logprobs(count: int, most: int) -> None:
    """Raise InvalidRequestError if a request may have more log probabilities than `most`."""
    if count > most:
        raise invalid(
            "parameters.logprobs",
            f"up to {count:,} log probabilities (results x max_tokens x (logprobs + 1), and prompt "
            "tokens x (prompt_logprobs + 1)); "
            f"a request may have {most:,} (LLM_MAX_LOGPROBS)",
        )


def generation_parameters(
    draft: SubmissionDraft, max_tokens: int, settings: Settings
) -> dict[str, Any]:
    """The stored parameters. Raises InvalidRequestError for more images than a request may have."""
    parameters: dict[str, Any] = draft.options.parameters.to_stored(max_tokens)
    if draft.model.adapter is not None:
        parameters[ADAPTER_PARAMETER] = draft.model.adapter
    if draft.token_ids is not None:
        parameters["prompt_token_ids"] = list(draft.token_ids)
    if draft.images is not None:
        check_image_count(draft.images, settings.max_images)
        check_pixels(draft.images["pixels"], settings.max_image_pixels)
        parameters[IMAGES] = dict(draft.images)
    return parameters


def check_image_count(images: Mapping[str, int] | None, most: int) -> None:
    """Raise InvalidRequestError for more images than a request may have."""
    if images is not None and (count := images["count"]) > most:
        raise invalid(
            "messages", f"have {count} images; a request may have {most} (LLM_MAX_IMAGES)"
        )


def check_pixels(count: int, most: int) -> None:
    """Raise InvalidRequestError for images that take too much memory once they are decoded."""
    if count > most:
        raise invalid(
            "messages",
            f"have images of {count:,} pixels; a request may have {most:,} (LLM_MAX_IMAGE_PIXELS): "
            "scale them down",
        )


def no_vision(model: Model) -> InvalidRequestError:
    return invalid(
        "messages",
        f"model {model.name} takes no images: it has no vision, or its chat template has no places "
        "for them (docs/vision.md)",
    )


def no_chat(model: Model) -> InvalidRequestError:
    return invalid(
        "messages",
        f"model {model.name} has no chat template in the model repository; send `content`",
    )


def invalid(field: str, message: str, **extra: object) -> InvalidRequestError:
    return InvalidRequestError(f"{field}: {message}.", [FieldError(field, message)], extra=extra)


def to_json(value: object) -> str:
    return orjson.dumps(value).decode()
