"""Attributions: results whose prompt is a text, and whose output is its parts found in a corpus.

They wait in the queue of their index, for its attribution workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

import orjson

from app.auth.principal import Principal
from app.core.ids import new_id
from app.core.queue_names import queue_of
from app.queue.enqueue import NewContext, NewResult
from app.queue.idempotency import NewKey, hash_request
from app.queue.team_limits import Limits
from app.results.rows import SubmittedRequest

# No client can send it: a key has no control characters.
_CACHED = "\x01attribution "


def following(index: str, parameters: Mapping[str, Any], deadline_seconds: float) -> str:
    """JSON text of the attribution that is to follow a result; its id is given already."""
    return orjson.dumps(
        {
            "id": str(new_id()),
            "queue": queue_of(index),
            "parameters": parameters,
            "deadline_seconds": deadline_seconds,
        }
    ).decode()


def renewed(stored: str) -> str:
    return orjson.dumps(orjson.loads(stored) | {"id": str(new_id())}).decode()


def cache_key(content: Mapping[str, Any], seconds: float) -> NewKey:
    request_hash = hash_request(content)
    return NewKey(_CACHED + request_hash.hex(), request_hash, seconds)


@dataclass(slots=True, frozen=True)
class AttributionDraft:
    """A text to attribute to the corpus of an index; `source` is the result that has the text."""

    id: UUID
    index: str
    text: str
    parameters: Mapping[str, Any]
    deadline_seconds: float | None = None
    source: SubmittedRequest | None = None

    def to_result(self, principal: Principal, default_deadline: float, limits: Limits) -> NewResult:
        result = NewResult(
            id=self.id,
            team_id=principal.team_id,
            context_id=new_id(),
            kind="attribution",
            model_name=queue_of(self.index),
            parameters=orjson.dumps(self.parameters).decode(),
            deadline_seconds=self.deadline_seconds or default_deadline,
            limits=limits,
            token_id=principal.token_id,
        )
        if self.source is None:
            context = NewContext(result.context_id, result.team_id, self.text, None, "{}")
            return replace(result, new_context=context)
        return replace(
            result,
            prompt=self.text,
            source_id=self.source.id,
            context_id=self.source.context_id,
            webhook_url=self.source.webhook_url,
            store=self.source.store,
        )
