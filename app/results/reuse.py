"""The digest of a request: equal digests of one team and model version have equal answers."""

import contextlib
from dataclasses import dataclass, replace
from uuid import UUID

import orjson

from app.core.errors import DatabaseUnavailableError, MemoryBusyError, NotFoundError
from app.inference.model_registry import Model
from app.queue.enqueue import NewResult
from app.queue.idempotency import hash_request
from app.queue.team_limits import Limits
from app.results.requests import SendOptions
from app.results.rows import ResultRow
from app.results.store import ResultStore


@dataclass(slots=True, frozen=True)
class Reused:
    """A committed result that an equal one has completed at once."""

    row: ResultRow

    @property
    def result_id(self) -> UUID:
        return self.row.id


def may_reuse(options: SendOptions, limits: Limits) -> bool:
    """Return whether an equal result may answer: by the request, or else by its team's setting.

    None may where each answer is a sample of its own. A result that an attribution follows has none:
    only an attempt's end sends it.
    """
    is_wanted = limits.reuse if options.reuse is None else options.reuse
    sampling = options.parameters
    is_repeatable = sampling.temperature == 0 or sampling.seed is not None
    return is_wanted and is_repeatable and options.attribute is None and options.pooling is None


async def read_reused(results: ResultStore, new: NewResult) -> Reused | None:
    """The committed result as an equal one has completed it; None if it runs."""
    if new.reuse_digest is None:
        return None
    # An error must not hide the id of a result that is committed.
    with contextlib.suppress(NotFoundError, MemoryBusyError, DatabaseUnavailableError):
        row = await results.get(new.team_id, new.id)
        if row.reused_from is not None:
            return Reused(row)
    return None


def text_of(result: NewResult) -> str:
    """The prompt of a result with a new context, as the engine reads it."""
    if result.prompt is not None:
        return result.prompt
    assert result.new_context is not None
    return result.new_context.content or ""


def with_digest(result: NewResult, model: Model, text: str) -> NewResult:
    """The result with the digest of its request, which `may_reuse`; `text`: as the engine reads it."""
    if result.has_images:  # the parameters have their size alone
        return result
    request = {
        "model": result.model_name,
        "revision": model.format.revision if model.format else "",
        "prompt": text,
        "parameters": orjson.loads(result.parameters),
    }
    return replace(result, reuse_digest=hash_request(request))
