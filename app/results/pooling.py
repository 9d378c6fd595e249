"""Embeddings and scores: results of a pooling model, which is asked for nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

from app.core.errors import InvalidRequestError
from app.inference.images import measure
from app.inference.model_registry import Model, ModelRegistry
from app.inference.pooling import DOCUMENT, MAX_DOCUMENTS, QUERY, Task
from app.queue.enqueue import Kind
from app.results.drafts import SubmissionDraft, invalid, to_json
from app.results.rendering import render
from app.results.requests import MAX_PROMPT_CHARACTERS, SendOptions
from app.results.token_budget import fits

_NAMES: dict[Task, str] = {"embed": "embeddings", "score": "scores"}
_ROUTES: dict[Task, str] = {"embed": "/v1/embeddings", "score": "/rerank or /score"}


def kind_of(options: SendOptions) -> Kind:
    if options.embedding is not None:
        return "embedding"
    return "generation" if options.score is None else "score"


def wrong_task(model: Model, options: SendOptions | None = None) -> InvalidRequestError | None:
    """The refusal of a model that computes something else; None where its files are not known."""
    pooling = options.pooling if options is not None else None
    wanted: Task | None = None if pooling is None else pooling.to_stored()["task"]
    if model.format is None or model.task == wanted:
        return None
    if model.task is None:
        assert wanted is not None
        return invalid("model", f"{model.name} generates text; it computes no {_NAMES[wanted]}")
    if wanted is not None:
        return invalid("model", f"{model.name} computes {_NAMES[model.task]}, no {_NAMES[wanted]}")
    return invalid(
        "model",
        f"{model.name} computes {_NAMES[model.task]} and generates no text; send to "
        f"{_ROUTES[model.task]}",
    )


async def choose_model(registry: ModelRegistry, name: str | None, task: Task) -> Model:
    """The model with this name; for None the one that is ready and has this task.

    Raises as `ModelRegistry.choose`.
    """
    if name is None:
        ready = [model for model in registry.all() if model.ready and model.task == task]
        if len(ready) == 1:
            return ready[0]
    return await registry.choose(name)


async def render_prompt(
    model: Model,
    options: SendOptions,
    messages: list[dict[str, Any]],
    arguments: Mapping[str, Any] | None = None,
) -> str:
    """Messages as the model reads them: by its template, or texts to score.

    Raises InvalidRequestError.
    """
    if options.pooling is not None and measure(messages) is not None:
        raise invalid("messages", "embeddings and scores are of texts alone, without images")
    if options.score is not None:
        return _query_with_documents(messages)
    if (error := wrong_task(model, options)) is not None:
        raise error
    return await render(model, messages, arguments)


def _query_with_documents(messages: Sequence[Mapping[str, Any]]) -> str:
    """JSON text of a query and its documents. Raises InvalidRequestError."""
    roles = [one["role"] for one in messages]
    count = len(roles) - 1
    if count < 1 or roles != [QUERY] + [DOCUMENT] * count:
        raise invalid(
            "messages", f"scores take one of the role {QUERY}, then one or more of {DOCUMENT}"
        )
    if count > MAX_DOCUMENTS:
        raise invalid("messages", f"{count:,} documents; a query may have {MAX_DOCUMENTS:,}")
    texts = [one["content"] for one in messages]
    # The model reads the query with each document.
    characters = sum(map(len, texts)) + (count - 1) * len(texts[0])
    if characters > MAX_PROMPT_CHARACTERS:
        raise invalid(
            "messages",
            f"{characters:,} characters, with the query for each document; {MAX_PROMPT_CHARACTERS:,} "
            "are allowed",
        )
    return to_json(texts)


async def pooling_parameters(draft: SubmissionDraft) -> dict[str, Any]:
    """The stored parameters. Raises InvalidRequestError if the model cannot run the request."""
    pooling = draft.options.pooling
    assert pooling is not None
    parameters = pooling.to_stored()
    if draft.model.adapter is not None:
        raise invalid("model", "embeddings and scores take no LoRA adapter: name the model alone")
    if draft.options.score is not None:
        if draft.prompt is None:
            raise invalid("content", f"a score takes messages: a {QUERY}, then {DOCUMENT}s")
    elif not pooling.truncate:
        await _check_length(draft)
    if draft.token_ids is not None:
        parameters["prompt_token_ids"] = list(draft.token_ids)
    return parameters


async def _check_length(draft: SubmissionDraft) -> None:
    model, length = draft.model, draft.model.max_model_len
    if length is None or model.format is None:
        return
    count: int | None
    if draft.token_ids is not None:
        count = len(draft.token_ids)
    elif fits(model, draft.size.bytes, 0):
        return
    else:
        count = await model.format.count_tokens(draft.text)
    if count is not None and count > length:
        raise invalid(
            "content",
            f"the text has {count} tokens; {model.name} takes {length}",
            max_model_len=length,
        )
