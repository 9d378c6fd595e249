"""Results: send prompts, read, wait, cancel, retry, delete."""

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec

from llm_api_client.errors import APIStatusError, WaitTimeoutError, problem_of
from llm_api_client.schemas import Attempt, Result
from llm_api_client.steps import Call, Request, exchange, fetch

Message = Mapping[str, str]
Prompt = str | Sequence[Message]
ResultOrId = str | Result

MAX_LIST = 1000
# Long polls: seconds that the service waits in one request, and silence beyond it that counts as lost.
_POLL_SECONDS = 30.0
_GRACE_SECONDS = 15.0


def id_of(result: ResultOrId) -> str:
    return result if isinstance(result, str) else result.id


def path_of(result: ResultOrId) -> str:
    return f"/results/{quote(id_of(result), safe='')}"


def new_key() -> str:
    """An Idempotency-Key: the service does a request once, however often it arrives."""
    return uuid.uuid4().hex


def request_of(prompt: Prompt | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a send; options that are None are left out."""
    body = {name: value for name, value in options.items() if value is not None}
    if isinstance(prompt, str):
        body["content"] = prompt
    elif prompt is not None:
        body["messages"] = list(prompt)
    return body


def send(
    prompt: Prompt | None = None,
    *,
    model: str,
    parameters: Mapping[str, Any] | None = None,
    context_id: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    priority: int | None = None,
    deadline_seconds: float | None = None,
    webhook_url: str | None = None,
    attribute: str | Mapping[str, Any] | None = None,
    embedding: Mapping[str, Any] | None = None,
    score: Mapping[str, Any] | None = None,
    retain_seconds: float | None = None,
    continue_lost_attempts: bool | None = None,
    reuse: bool | None = None,
    idempotency_key: str | None = None,
    wait: float = 0,
) -> Call[Result]:
    """Send a prompt to a model, and return the stored result, usually still pending.

    Args:
        prompt: a text, or the messages of a chat; None with `context_id`.
        model: the model's name.
        parameters: of sampling, such as `max_tokens`, `temperature`, `stop`.
        context_id: a stored prompt instead of `prompt`.
        metadata: kept and returned; at most 16 KiB as JSON.
        priority: -100 to 100; below 0 lets other results go first.
        deadline_seconds: fail if not finished by then; 24 hours by default, at most 7 days.
        webhook_url: called when the result has ended.
        attribute: an index's name, or its options: the completed text is attributed to that corpus.
        embedding: compute the vector of the prompt instead of a text (`Result.vector`), with these options,
            such as `dimensions`; {} for none. It takes the place of `parameters`.
        score: compute the scores of messages of the role `document` for the one of the role `query` before
            them (`Result.scores`), with these options, such as `raw`; {} for none.
        retain_seconds: delete the result so long after its end.
        continue_lost_attempts: False: an attempt after a lost one starts over.
        reuse: True: a completed result of an equal request answers it, if there is one
            (`Result.reused_from`). Needs a temperature of 0 or a seed. False: it runs. Default: the
            team's setting.
        idempotency_key: the same key and request return the first result; generated if None, so that a
            retry after a broken connection repeats nothing.
        wait: seconds to wait for the end in the same request, at most 60.

    Raises:
        InvalidRequestError: a field is wrong; `fields` names it.
        LimitReachedError: a limit was still reached when the client's patience was over.
    """
    options = {
        "model": model, "parameters": parameters, "context_id": context_id, "metadata": metadata,
        "priority": priority, "deadline_seconds": deadline_seconds, "webhook_url": webhook_url,
        "attribute": attribute, "embedding": embedding, "score": score,
        "retain_seconds": retain_seconds,
        "continue_lost_attempts": continue_lost_attempts, "reuse": reuse,
    }  # fmt: skip
    body = request_of(prompt, options)
    return (yield from _send("/results/", body, idempotency_key, wait))


def _send(path: str, body: object, key: str | None, wait: float) -> Call[Result]:
    headers = {"Idempotency-Key": key or new_key()}
    if wait > 0:
        headers["Prefer"] = f"wait={wait:.0f}"
    timeout = wait + _GRACE_SECONDS if wait > 0 else None
    return (
        yield from fetch(Request("POST", path, json=body, headers=headers, timeout=timeout), Result)
    )


def send_many(
    requests: Iterable[Prompt | Mapping[str, Any]], *, model: str | None = None, **options: Any
) -> Call[list[Result | APIStatusError]]:
    """Send up to 1,000 prompts in one commit; a wrong one does not reject the others.

    Args:
        requests: texts, lists of messages, or mappings with the arguments of `send` (`content` or
            `messages` for the prompt). A mapping without an `idempotency_key` gets one.
        model: of the requests that name none.
        options: arguments of `send`, for the requests that do not give them.

    Returns:
        In the order of the requests, each one's result, or the error of its refusal.
    """
    bodies = [_item(request, {"model": model, **options}) for request in requests]
    if not bodies:
        return []
    reply = yield from exchange(Request("POST", "/results/", json=bodies))
    return [_outcome(item) for item in msgspec.json.decode(reply.body, type=list[msgspec.Raw])]


def _item(request: Prompt | Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(request, Mapping):
        body = request_of(None, {**options, **request})
    else:
        body = request_of(request, options)
    body.setdefault("idempotency_key", new_key())
    return body


class _Kind(msgspec.Struct):
    code: str | None = None
    id: str | None = None


def _outcome(item: msgspec.Raw) -> Result | APIStatusError:
    data = bytes(item)
    if msgspec.json.decode(data, type=_Kind).id is None:
        return problem_of(data)
    return msgspec.json.decode(data, type=Result)


def get(result: ResultOrId, *, wait: float = 0, partial: bool = False) -> Call[Result]:
    """Read a result as it is.

    Args:
        result: a result or its id.
        wait: seconds to wait for its end, at most 60.
        partial: while it is pending, `text` is the text so far.
    """
    query = {"wait": wait or None, "partial": partial or None}
    timeout = wait + _GRACE_SECONDS if wait else None
    return (yield from fetch(Request("GET", path_of(result), query, timeout=timeout), Result))


def wait(result: ResultOrId, timeout: float | None = None) -> Call[Result]:
    """Wait until a result has ended, and return it; it may have failed (`Result.checked`).

    Args:
        result: a result or its id.
        timeout: seconds; None: until the service ends it, at the latest by its deadline.

    Raises:
        WaitTimeoutError: it did not end in that time, and continues.
    """
    until = None if timeout is None else time.monotonic() + timeout
    while True:
        left = _POLL_SECONDS if until is None else until - time.monotonic()
        read = yield from get(result, wait=max(0.0, min(left, _POLL_SECONDS)))
        if read.has_ended:
            return read
        if until is not None and time.monotonic() >= until:
            raise WaitTimeoutError(read.id, timeout or 0.0)


def cancel(result: ResultOrId) -> Call[Result]:
    """Cancel a result: the engine is freed, the text so far is kept. An ended one stays as it is."""
    return (yield from fetch(Request("POST", f"{path_of(result)}/cancel"), Result))


def cancel_all(*, model: str | None = None, context_id: str | None = None) -> Call[int]:
    """Cancel all pending results of a model, a prompt, or both; returns their number."""
    query = {"model_name": model, "context_id": context_id}
    reply = yield from exchange(Request("POST", "/results/cancel", query))
    counted: dict[str, int] = msgspec.json.decode(reply.body, type=dict[str, int])
    return sum(counted.values())


def retry(
    result: ResultOrId, *, idempotency_key: str | None = None, wait: float = 0
) -> Call[Result]:
    """Send the request of an ended result again; the new result names it in `retry_of`.

    Args:
        result: a result or its id.
        idempotency_key: as in `send`.
        wait: seconds to wait for the end in the same request, at most 60.

    Raises:
        ConflictError: the result is pending.
    """
    return (yield from _send(f"{path_of(result)}/retry", None, idempotency_key, wait))


def delete(result: ResultOrId, *, force: bool = False) -> Call[None]:
    """Delete a result with its attributions; a pending one only with `force`."""
    yield from exchange(Request("DELETE", path_of(result), {"force": force or None}))


def attempts(result: ResultOrId) -> Call[list[Attempt]]:
    """The attempts of a result: times, worker and error of each."""
    return (yield from fetch(Request("GET", f"{path_of(result)}/attempts"), list[Attempt]))
