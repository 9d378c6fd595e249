"""The real side of the queue's model: tables as plain values, notifications, lost connections."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any, Literal, cast
from uuid import UUID

import asyncpg
import orjson

from app.core.database import Connection, Database
from app.core.listener import APPENDED, CANCELLED, ENDED, ENQUEUED, WEBHOOKS
from tests.integration.queue.queue_model import QueueModel
from tests.integration.queue.result_model import Modelled

# Seconds. Moments of the model are multiples of it, and its clock does not run: an example takes far
# less, so each moment is surely past or surely to come.
HALF_UNIT = 150
CutMoment = Literal["before", "after"]
_CHANNELS = (APPENDED, CANCELLED, ENDED, ENQUEUED, WEBHOOKS)
_ID_CHANNELS = (APPENDED, CANCELLED, ENDED)
_RESET = """
DELETE FROM webhook_deliveries; DELETE FROM undigested_results; DELETE FROM result_chunks;
DELETE FROM idempotency_keys; DELETE FROM results; DELETE FROM contexts; DELETE FROM workers;
DELETE FROM team_limits;
"""
_ROWS = """
SELECT r.id, r.state, r.worker_id, r.attempt, r.lost_attempts, r.engine_deaths, r.text_attempt,
  r.continuations, r.fair_key, r.output, r.prompt_tokens, r.completion_tokens, r.finish_reason,
  r.error_code, r.attempt_history, r.cancel_requested_at IS NOT NULL AS is_cancelled,
  r.started_at IS NOT NULL AS has_started, r.finished_at IS NOT NULL AS has_ended,
  extract(epoch FROM r.deadline_at - now())::float8 AS deadline,
  extract(epoch FROM r.not_before - now())::float8 AS not_before,
  extract(epoch FROM r.expires_at - r.finished_at)::float8 AS retained,
  (SELECT jsonb_agg(jsonb_build_array(c.attempt, c."offset", c.text, c.completion_tokens)
                    ORDER BY c.attempt, c."offset")
   FROM result_chunks c WHERE c.result_id = r.id) AS chunks,
  (SELECT count(*) FROM undigested_results u WHERE u.result_id = r.id) AS ends,
  (SELECT d.url FROM webhook_deliveries d WHERE d.result_id = r.id) AS delivery
FROM results r
"""
# Workers and whether they are dead, keys and their results, contexts and their teams.
_OTHERS = """
SELECT (SELECT jsonb_object_agg(id, dead_at IS NOT NULL) FROM workers) AS workers,
  (SELECT jsonb_object_agg(team_id || ' ' || key, result_id) FROM idempotency_keys) AS keys,
  (SELECT jsonb_object_agg(id, team_id) FROM contexts) AS contexts
"""
# A jump of the clock, seen from the other side: all moments of the tables move instead.
_TIMES = {
    "results": (
        "deadline_at", "not_before", "started_at", "cancel_requested_at", "finished_at",
        "expires_at",
    ),
    "workers": ("started_at", "lease_expires_at", "dead_at"),
    "idempotency_keys": ("expires_at",),
}  # fmt: skip


def to_grid(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds / HALF_UNIT) * HALF_UNIT


def expected(one: Modelled, now: float) -> dict[str, object]:
    """Return the row of `Tables.results` that a result of the model should have."""
    sent, answer, has_ended = one.sent, one.answer, one.state != "pending"
    return {
        "id": sent.id,
        "state": one.state,
        "worker_id": one.worker,
        "attempt": one.attempt,
        "lost_attempts": one.lost_attempts,
        "engine_deaths": one.engine_deaths,
        "text_attempt": one.text_attempt,
        "continuations": one.continuations,
        "fair_key": one.fair_key,
        "output": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "finish_reason": answer.finish_reason,
        "error_code": answer.error,
        "attempt_history": [
            [entry.attempt, entry.worker, entry.counted, entry.continued_from, entry.error]
            for entry in one.history
        ],
        "is_cancelled": one.is_cancelled,
        "has_started": one.worker is not None,
        "has_ended": has_ended,
        "deadline": to_grid(one.deadline - now),
        "not_before": None if one.not_before is None else to_grid(one.not_before - now),
        "retained": to_grid(sent.retain_seconds) if has_ended else None,
        "chunks": sorted([c.attempt, c.offset, c.text, c.completion_tokens] for c in one.chunks),
        "ends": one.ends,
        "delivery": sent.webhook_url if has_ended else None,
    }


class Tables:
    """The database as the model sees it; also the one connection that listens."""

    def __init__(self, connection: asyncpg.Connection) -> None:
        self.connection = connection
        self._received: list[tuple[str, str]] = []

    async def listen(self) -> None:
        for channel in _CHANNELS:
            await self.connection.add_listener(channel, self._receive)

    def _receive(self, _connection: object, _pid: int, channel: str, payload: object) -> None:
        text = str(payload)
        names = text.split(",") if channel in (*_ID_CHANNELS, ENQUEUED) else [text]
        self._received += [(channel, name) for name in names]

    async def reset(self) -> None:
        await self.connection.execute(_RESET)
        self._received.clear()

    def take_events(self) -> list[tuple[str, str]]:
        """Return what was received; all that is committed, once a statement has run after it."""
        received, self._received = self._received, []
        return received

    async def results(self) -> list[dict[str, object]]:
        return [_to_values(row) for row in await self.connection.fetch(_ROWS)]

    async def others(self) -> dict[str, object]:
        row = await self.connection.fetchrow(_OTHERS)
        assert row is not None
        return {name: orjson.loads(value or "{}") for name, value in row.items()}

    async def jump(self, seconds: float) -> None:
        """Let the database's clock jump, also back."""
        for table, columns in _TIMES.items():
            moved = ", ".join(f"{name} = {name} - make_interval(secs => $1)" for name in columns)
            await self.connection.execute(f"UPDATE {table} SET {moved}", seconds)

    async def register(self, worker: UUID, seconds: float) -> None:
        await self.connection.execute(
            "INSERT INTO workers (id, host, pid, lease_expires_at)"
            " VALUES ($1, 'h', 1, now() + make_interval(secs => $2))",
            worker,
            seconds,
        )

    async def terminate(self, pid: int) -> None:
        """End a backend, and wait until it is gone."""
        await self.connection.execute("SELECT pg_terminate_backend($1, 60000)", pid)

    async def renew(self, worker: UUID, seconds: float) -> None:
        await self.connection.execute(
            """UPDATE workers SET lease_expires_at = now() + make_interval(secs => $2)
               WHERE id = $1 AND dead_at IS NULL""",
            worker,
            seconds,
        )


def expected_others(model: QueueModel) -> dict[str, object]:
    return {
        "workers": {str(key): one.dead_at is not None for key, one in model.workers.items()},
        "keys": {" ".join(place): str(result_id) for place, (result_id, _) in model.keys.items()},
        "contexts": {str(key): team for key, team in model.contexts.items()},
    }


def _to_values(row: asyncpg.Record) -> dict[str, object]:
    history = [
        [
            entry["attempt"],
            UUID(entry["worker_id"]),
            entry["counted"],
            entry["continued_from"],
            entry["error"] and entry["error"]["code"],
        ]
        for entry in orjson.loads(row["attempt_history"])
    ]
    return dict(row) | {
        "attempt_history": history,
        "chunks": orjson.loads(row["chunks"] or "[]"),
        **{name: to_grid(row[name]) for name in ("deadline", "not_before", "retained")},
    }


class CuttableDatabase(Database):
    """A database that can lose a connection at a statement's commit.

    `cut`: which connection from now on (0: the next), and whether its first statement is
    committed before the server ends it.
    """

    cut: tuple[int, CutMoment] | None = None
    tables: Tables

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        async with super().connection() as connection:
            if self.cut is None:
                yield connection
                return
            skipped, moment = self.cut
            self.cut = (skipped - 1, moment) if skipped else None
            yield connection if skipped else cast(Connection, _Cut(connection, self.tables, moment))


class _Cut:
    """A connection whose backend ends with its first statement."""

    def __init__(self, connection: Connection, tables: Tables, moment: CutMoment) -> None:
        self._connection, self._tables, self._moment = connection, tables, moment

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._connection, name)
        if name not in ("execute", "fetch", "fetchrow", "fetchval"):
            return method

        async def run(*arguments: object) -> None:
            if self._moment == "before" and not self._connection.is_in_transaction():
                await self._connection.execute("BEGIN")
            await method(*arguments)
            await self._tables.terminate(self._connection.get_server_pid())
            await self._connection.execute("SELECT")
            raise AssertionError("the backend answers although it was terminated")

        return run
