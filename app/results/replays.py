"""Repeated requests: the results that a request has under its idempotency key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import UUID

from app.core.errors import (
    IdempotencyConflictError,
    MemoryBusyError,
    NotFoundError,
    ResultDeletedError,
    ServiceError,
)
from app.queue.idempotency import IdempotencyKeys, NewKey, TakenKey, hash_request
from app.queue.job_rows import JobRow, TakenRow
from app.results.drafts import GroupRequest
from app.results.jobs.store import JobStore
from app.results.requests import SendOptions
from app.results.rows import ResultRow, State, erased
from app.results.store import ResultStore

_KEYS = {"idempotency_key", "job_id", "job_key"}


@dataclass(slots=True, frozen=True)
class Replayed:
    """The result that the same request has under its idempotency key, as it is now."""

    row: ResultRow

    @property
    def result_id(self) -> UUID:
        return self.row.id


@dataclass(slots=True, frozen=True)
class ReplayedRow:
    """The result that a row of a job has, without its texts: a job is sent again in long lists."""

    result_id: UUID
    state: State
    row: JobRow


@dataclass(slots=True, frozen=True)
class Replays:
    """Makes the keys of requests, and finds the results that have them."""

    keys: IdempotencyKeys
    jobs: JobStore
    results: ResultStore

    def key(self, options: SendOptions, **request: str) -> NewKey | JobRow | None:
        if options.job_id is not None:
            assert options.job_key is not None  # its schema
            hashed = hash_request(request | _members(options))
            return JobRow(options.job_id, options.job_key, hashed)
        if options.idempotency_key is None:
            return None
        return self.keys.new(options.idempotency_key, hash_request(request | _members(options)))

    def group_key(self, request: GroupRequest) -> NewKey | None:
        """The key of a group, which is never a row of a job."""
        key = request.options.idempotency_key
        if key is None:
            return None
        content = {
            "model": request.model,
            "prompts": [
                [
                    *(one.content, one.messages, dict(one.template_arguments)),
                    # Different tokens may have one text.
                    *([] if one.token_ids is None else [list(one.token_ids)]),
                ]
                for one in request.prompts
            ],
            "n": request.n,
            # Not its content, which has new ids each time.
            "is_response": request.request is not None,
            "is_background": request.waits_for_model,
            "store": request.store,
        }
        return self.keys.new(key, hash_request(content | _members(request.options)))

    async def find(
        self, team_id: str, key: NewKey | JobRow
    ) -> Replayed | ReplayedRow | ServiceError | None:
        """The result of the same request under its key, or the error in its place."""
        if isinstance(key, JobRow):
            return await self._find_row(key)
        return await self._find_key(team_id, key)

    async def _find_key(self, team_id: str, key: NewKey) -> Replayed | ServiceError | None:
        taken = await self.keys.find(team_id, key.key)
        if taken is None:
            return None
        if taken.request_hash != key.request_hash:
            return _conflict(taken)
        try:
            row = await self.results.get(team_id, taken.result_id)
        except NotFoundError:  # its key is deleted with it
            return None
        except MemoryBusyError as error:  # of many in a list: it can be read alone
            return replace(error, extra={"result_id": str(taken.result_id)})
        return erased(row) if row.erased_at is not None else Replayed(row)

    async def _find_row(self, row: JobRow) -> ReplayedRow | ServiceError | None:
        taken = await self.jobs.find_row(row.job_id, row.key)
        if taken is None:
            return None
        if taken.request_hash != row.request_hash:
            return _conflict(taken)
        if taken.state is None:
            return deleted(row, taken.result_id)
        return ReplayedRow(taken.result_id, taken.state, row)

    async def read(self, team_id: str, replayed: ReplayedRow) -> Replayed:
        """The whole result of a row. Raises ResultDeletedError, ErasedError and MemoryBusyError."""
        try:
            row = await self.results.get(team_id, replayed.result_id)
        except NotFoundError as error:
            raise deleted(replayed.row, replayed.result_id) from error
        if row.erased_at is not None:
            raise erased(row)
        return Replayed(row)

    async def find_group(self, team_id: str, key: NewKey, size: int) -> Sequence[Replayed] | None:
        """The known results, or None. Raises IdempotencyConflictError and ErasedError."""
        first = await self._find_key(team_id, key)
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
    members = options.model_dump(mode="json", exclude=_KEYS, exclude_defaults=True)
    if options.reuse is False:  # once the default: keys of that time find their results
        del members["reuse"]
    return members


def _conflict(taken: TakenKey | TakenRow) -> IdempotencyConflictError:
    return IdempotencyConflictError(
        f"Result {taken.result_id} was made under this key, by another request. Repeat that "
        "one unchanged, or take a new key.",
        extra={"result_id": str(taken.result_id)},
    )


def deleted(row: JobRow, result_id: UUID) -> ResultDeletedError:
    return ResultDeletedError(
        f"Result {result_id} of this row has been deleted. Its key is taken as long as the job lives: "
        "take a new key to run the request again.",
        extra={"result_id": str(result_id), "job_key": row.key},
    )
