"""Comparison: one prompt, sent to several models."""

from collections.abc import Mapping, Sequence
from typing import Any

from llm_api_client.errors import APIStatusError, ConfigurationError
from llm_api_client.operations.inference import list_models
from llm_api_client.operations.results import Prompt, cancel, request_of, send_many, wait
from llm_api_client.schemas import Comparison, Result
from llm_api_client.steps import Call


def compare(
    prompt: Prompt,
    *,
    models: Sequence[str] | None = None,
    parameters: Mapping[str, Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
    deadline_seconds: float | None = None,
    reuse: bool | None = None,
) -> Call[Comparison]:
    """Send a prompt to several models in one commit, and return their results when all have ended.

    A result may have failed (`Result.error`). In a notebook the results stand side by side.

    Args:
        prompt: a text, or the messages of a chat.
        models: their names, in the order of the results; a model may be named twice. Default: all models
            that are ready.
        parameters: of sampling, the same for each model.
        metadata: of each result.
        deadline_seconds: a result that has not ended by then fails.
        reuse: as in `send`.

    Raises:
        ConfigurationError: no model is named or ready.
        APIStatusError: the service refused a model's request; the others are cancelled.
    """
    if models is None:
        models = [model.name for model in (yield from list_models()) if model.ready]
    if not models:
        raise ConfigurationError("No model is ready: name the models to compare.")
    requests = [request_of(prompt, {"model": model}) for model in models]
    outcomes = yield from send_many(
        requests, parameters=parameters, metadata=metadata, deadline_seconds=deadline_seconds,
        reuse=reuse,
    )  # fmt: skip
    accepted = [one for one in outcomes if isinstance(one, Result)]
    refusal = next((one for one in outcomes if isinstance(one, APIStatusError)), None)
    if refusal is not None:
        for one in accepted:
            yield from cancel(one)
        raise refusal
    results = []
    for one in accepted:
        ended = yield from wait(one)
        results.append(ended)
    return Comparison(results=results)
