"""Repeated requests: the results that a request has under its idempotency key."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from app.core.errors import IdempotencyConflictError, MemoryBusyError, NotFoundError, ServiceError
from app.queue.idempotency import IdempotencyKeys, NewKey, hash_request
from app.results.drafts import GroupRequest
from app.results.requests import SendOptions
from app.results.rows import ResultRow, erased
from app.results.store import ResultStore


@dataclass(slots=True, frozen=True)
class Replayed:
    """The result that the same request has under its idempotency key, as it is now."""

    row: ResultRow

    @property
    def result_id(self) -> UUID:
        return self.row.id


@dataclass(slots=True, frozen=True)
class Replays:
    """Makes the keys of requests, and finds the results that have them."""

    keys: IdempotencyKeys
    results: ResultStore

    def key(self, options: SendOptions, **request: str) -> NewKey | None:
        if options.idempotency_key is None:
            return None
        return self.keys.new(options.idempotency_key, hash_request(request | _members(options)))

    def group_key(self, request: GroupRequest) -> NewKey | None:
        key = request.options.idempotency_key
        if key is None:
            return None
        content = {
            "model": request.model,
            "prompts": [
                [one.content, one.messages, dict(one.template_arguments)] for one in request.prompts
            ],
            "n": request.n,
            # Not its content, which has new ids each time.
            "is_response": request.request is not None,
            "is_background": request.waits_for_model,
            "store": request.store,
        }
        return self.keys.new(key, hash_request(content | _members(request.options)))

    async def find(self, team_id: str, key: NewKey) -> Replayed | ServiceError | None:
        """The result of the same request under its key, or the error in its place."""
        taken = await self.keys.find(team_id, key.key)
        if taken is None:
            return None
        if taken.request_hash != key.request_hash:
            return IdempotencyConflictError(
                f"Result {taken.result_id} was made under this idempotency key, by another request. "
                "Repeat that one unchanged, or take a new key.",
                extra={"result_id": str(taken.result_id)},
            )
        try:
            row = await self.results.get(team_id, taken.result_id)
        except NotFoundError:
            return None  # deleted meanwhile, together with its key
        except MemoryBusyError as error:
            return error
        return erased(row) if row.erased_at is not None else Replayed(row)

    async def find_group(self, team_id: str, key: NewKey, size: int) -> Sequence[Replayed] | None:
        """The known results, or None. Raises IdempotencyConflictError and ErasedError."""
        first = await self.find(team_id, key)
        if isinstance(first, ServiceError):
            raise first
        if first is None or size == 1:
            return None if first is None else [first]
        rows = await self.results.group(team_id, first.row.id)
        if len(rows) != size:
            raise IdempotencyConflictError(
                f"{size - len(rows)} of the {size} results under this idempotency key were deleted. "
                "Take a new key.",
                extra={"result_id": str(first.row.id)},
            )
        for row in rows:
            if row.erased_at is not None:
                raise erased(row)
        return [Replayed(row) for row in rows]


def _members(options: SendOptions) -> dict[str, Any]:
    """The members of a request without those that repeat a default."""
    return options.model_dump(mode="json", exclude={"idempotency_key"}, exclude_defaults=True)
