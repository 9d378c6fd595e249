"""Attributions: results whose prompt is a text, and whose answer is what a corpus has of it.

They wait in the queue of their index, and are run by its attribution workers.
"""

from collections.abc import Mapping
from typing import Any
from uuid import UUID

import orjson

from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.queue.enqueue import NewContext, NewResult
from app.queue.idempotency import NewKey, hash_request
from app.queue.team_limits import Limits

# No client can send it: a key has no control characters.
_CACHED = "\x01attribution "


def following(index: str, parameters: Mapping[str, Any], deadline_seconds: float) -> str:
    """The attribution that is to follow a result, as the result keeps it.

    Its id is decided now: whatever is sent again, there will be one.
    """
    return orjson.dumps(
        {
            "id": str(new_id()),
            "queue": queue_of(index),
            "parameters": parameters,
            "deadline_seconds": deadline_seconds,
        }
    ).decode()


def renewed(stored: str) -> str:
    """The same for another result."""
    return orjson.dumps(orjson.loads(stored) | {"id": str(new_id())}).decode()


def cache_key(content: Mapping[str, Any], seconds: float) -> NewKey:
    """The key under which the same attribution is found again, for a time."""
    request_hash = hash_request(content)
    return NewKey(_CACHED + request_hash.hex(), request_hash, seconds)


def new_attribution(
    result_id: UUID,
    team_id: str,
    index: str,
    text: str,
    parameters: Mapping[str, Any],
    deadline_seconds: float,
    limits: Limits,
    **members: Any,
) -> NewResult:
    """The attribution of a text that is stored with it; of a result's, `members` name context and
    source.
    """
    if "context_id" not in members:
        context = NewContext(new_id(), team_id, text, None, "{}")
        members |= {"context_id": context.id, "new_context": context}
    else:
        members["prompt"] = text
    return NewResult(
        id=result_id,
        team_id=team_id,
        kind="attribution",
        model_name=queue_of(index),
        parameters=orjson.dumps(parameters).decode(),
        deadline_seconds=deadline_seconds,
        limits=limits,
        **members,
    )
