"""Past results: lists, search, exports."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal

import msgspec

from llm_api_client.errors import ConfigurationError
from llm_api_client.operations.paging import pages
from llm_api_client.schemas import Result, State
from llm_api_client.steps import Again, Emit, Feed, Lost, Open, QueryValue, Read, Reply, Request


def _filters(
    state: State | None,
    model: str | None,
    context_id: str | None,
    error_code: str | None,
    retryable: bool | None,
    created_after: datetime | str | None,
    created_before: datetime | str | None,
    q: str | None,
    ids: Sequence[str] | None = None,
    metadata: Mapping[str, str | float] | None = None,
) -> dict[str, QueryValue]:
    return {
        "state": state, "model_name": model, "context_id": context_id, "error_code": error_code,
        "retryable": retryable, "created_after": _time(created_after),
        "created_before": _time(created_before), "q": q,
        "ids": None if ids is None else ",".join(ids),
        **{f"metadata[{key}]": _pair_value(key, value) for key, value in (metadata or {}).items()},
    }  # fmt: skip


def _pair_value(key: str, value: str | float) -> QueryValue:
    """A value in the form of PostgreSQL, which writes numbers without an exponent.

    Raises ConfigurationError for what no pair has, such as None.
    """
    if isinstance(value, float):
        return format(Decimal(repr(value)), "f")
    if not isinstance(value, str | int):
        raise ConfigurationError(f"metadata[{key!r}]: a text, a number or a boolean is needed.")
    return value


def _time(value: datetime | str | None) -> str | None:
    return value.isoformat() if isinstance(value, datetime) else value


def list_results(
    *,
    limit: int | None = None,
    state: State | None = None,
    model: str | None = None,
    context_id: str | None = None,
    error_code: str | None = None,
    retryable: bool | None = None,
    created_after: datetime | str | None = None,
    created_before: datetime | str | None = None,
    ids: Sequence[str] | None = None,
    metadata: Mapping[str, str | float] | None = None,
    full: bool = False,
    prompts: bool = False,
) -> Feed[Result]:
    """Iterate over results, newest first.

    Args:
        limit: most results; None: all.
        state: `pending`, `completed` or `failed`.
        model: the model's name.
        context_id: of a stored prompt.
        error_code: of failed results.
        retryable: whether another try may succeed.
        created_after: a time, as a datetime or in ISO 8601; `created_before` likewise.
        created_before: see `created_after`.
        ids: at most 100 ids of results; unknown ones are left out.
        metadata: at most 16 pairs that the result's metadata has; texts, numbers or booleans.
        full: with the whole texts; otherwise their first 1,000 characters, and `truncated` is true
            for the longer ones.
        prompts: with the beginning of each prompt (`prompt_start`).
    """
    query = _filters(
        state, model, context_id, error_code, retryable, created_after, created_before, None, ids,
        metadata,
    )  # fmt: skip
    shown = {"full": full or None, "prompts": prompts or None}
    yield from pages("/results/", Result, {**query, **shown}, limit)


def search(
    q: str,
    *,
    limit: int | None = None,
    state: State | None = None,
    model: str | None = None,
    created_after: datetime | str | None = None,
    created_before: datetime | str | None = None,
    metadata: Mapping[str, str | float] | None = None,
    full: bool = False,
) -> Feed[Result]:
    """Iterate over the results with these words in prompt, text or error, newest first.

    Args:
        q: words, all of them; `"a phrase"`, `or` and `-not`, as in search engines.
        limit: most results; None: all.
        state: as in `list`, like all other arguments.
        model: the model's name.
        created_after: a time.
        created_before: a time.
        metadata: pairs.
        full: with the whole texts.

    Raises:
        InvalidRequestError: `search_too_slow`: narrow the search.
    """
    query = _filters(
        state, model, None, None, None, created_after, created_before, q, metadata=metadata
    )
    yield from pages("/results/", Result, {**query, "full": full or None, "prompts": True}, limit)


def export(
    *,
    limit: int | None = None,
    state: State | None = None,
    model: str | None = None,
    context_id: str | None = None,
    error_code: str | None = None,
    retryable: bool | None = None,
    created_after: datetime | str | None = None,
    created_before: datetime | str | None = None,
    q: str | None = None,
    ids: Sequence[str] | None = None,
    metadata: Mapping[str, str | float] | None = None,
) -> Feed[Result]:
    """Iterate over results with whole texts and prompts (`content` or `messages`), newest first.

    A response that breaks off is continued behind its last whole line. Arguments as in `list` and `search`.

    Raises:
        ConnectionFailedError: no result arrived within the client's patience.
    """
    query = _filters(
        state, model, context_id, error_code, retryable, created_after, created_before, q, ids,
        metadata,
    )  # fmt: skip
    after: str | None = None
    left = limit
    while left is None or left > 0:
        opened = Request("GET", "/results/export", {**query, "limit": left, "after": after})
        outcome = yield Open(opened)
        rest = b""
        while isinstance(outcome, bytes) or (isinstance(outcome, Reply) and outcome.status == 200):
            outcome = yield Read()
            if outcome == b"":
                return
            if isinstance(outcome, bytes):
                *lines, rest = (rest + outcome).split(b"\n")
                for line in lines:
                    result = msgspec.json.decode(line, type=Result)
                    after, left = result.id, None if left is None else left - 1
                    yield Emit(result)
        if left != 0:
            assert isinstance(outcome, (Reply, Lost))
            yield Again(outcome)
