"""Invariants of jobs and budgets after a storm."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from tests.chaos.stack import Stack
from tests.chaos.storm.invariants import Account
from tests.chaos.storm.orders import SPENT, Order
from tests.integration.webhook_receiver import Receiver

JOB_COUNTS = "each job has ended, and its counts equal its rows"
JOB_ROWS = "each row of a job has the end of its result, and a place of its own"
JOB_CANCELLED = "no job, cancelled ones included, has a pending row"
JOB_KEYS = "the keys of a job have one row each, and a deleted job has none"
JOB_ANNOUNCED = "each end of a job is announced by one message"
BUDGET = "nothing of a team past its budget is stored"

Row = Mapping[str, Any]

_JOBS = """
SELECT j.id::text, j.closed_at, j.ended_at, j.cancel_requested_at, p.rows, p.last_place, p.ended::text
FROM jobs j JOIN job_progress p ON p.job_id = j.id
"""
# A row outlives its result: no join.
_ROWS = """
SELECT w.job_id::text, w.key, w.place, w.ended_as,
  (SELECT CASE r.state WHEN 'pending' THEN 'pending' ELSE coalesce(r.error_code, 'completed') END
   FROM results r WHERE r.id = w.result_id) AS result
FROM job_rows w
"""


@dataclass
class Tables:
    """The jobs of a database, and their rows."""

    jobs: list[dict[str, Any]]
    rows: list[dict[str, Any]]


async def read(stack: Stack) -> Tables:
    return Tables(
        [dict(row) for row in await stack.fetch(_JOBS)],
        [dict(row) for row in await stack.fetch(_ROWS)],
    )


def check_jobs(
    account: Account, orders: Sequence[Order], tables: Tables, receiver: Receiver
) -> None:
    """Check the tables of jobs among each other, and against the clients and the webhooks."""
    of_job: defaultdict[str, list[Row]] = defaultdict(list)
    for row in tables.rows:
        of_job[row["job_id"]].append(row)
    for job in tables.jobs:
        _check_job(account, job, of_job[job["id"]])
    messages = _messages(receiver)
    known = {job["id"] for job in tables.jobs}
    for order in orders:
        if order.job_id:
            _check_order(account, order, known, of_job[order.job_id])
        if order.ends and not order.is_deleted:
            _check_messages(account, order, messages[order.job_id])


def _check_job(account: Account, job: Row, rows: Sequence[Row]) -> None:
    ended: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["ended_as"] is not None:
            ended[row["ended_as"]] += 1
        is_same = row["ended_as"] == row["result"] and row["place"] is not None
        account.require(JOB_ROWS, holds=is_same, otherwise=f"{job['id']}: {row}")
        is_over = row["result"] != "pending" and row["ended_as"] is not None
        account.require(JOB_CANCELLED, holds=is_over, otherwise=f"{job['id']}: {row}")
    places = [row["place"] for row in rows]
    account.require(
        JOB_ROWS,
        holds=len(set(places)) == len(places),
        otherwise=f"{job['id']}: the places {places}",
    )
    account.require(
        JOB_COUNTS,
        holds=job["ended_at"] is not None
        and job["rows"] == len(rows)
        and orjson.loads(job["ended"]) == ended,
        otherwise=f"{job}: {len(rows)} rows, ended as {dict(ended)}",
    )


def _check_order(account: Account, order: Order, known: set[str], rows: Sequence[Row]) -> None:
    keys = sorted(int(row["key"]) for row in rows)
    expected = [] if order.is_deleted else list(range(len(order.prompts)))
    holds = keys == expected if order.ids else len(set(keys)) == len(keys)
    account.require(
        JOB_KEYS,
        holds=holds and (order.job_id in known) is not order.is_deleted,
        otherwise=f"order {order.number}, job {order.job_id}: the keys {keys}",
    )


def _messages(receiver: Receiver) -> dict[str, dict[str, Any]]:
    """The messages about each job: by their ids, the job in each."""
    messages: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for call in receiver.calls:
        event = orjson.loads(call.body)
        if event["type"] == "job.ended":
            messages[event["data"]["id"]][call.id] = event["data"]
    return messages


def _check_messages(account: Account, order: Order, messages: Mapping[str, Any]) -> None:
    """A job that ends again before its message is delivered has one message less."""
    last = messages[max(messages)] if messages else {}
    pending = {one["counts"]["pending"] for one in messages.values()}
    account.require(
        JOB_ANNOUNCED,
        holds=1 <= len(messages) <= order.ends
        and pending == {0}
        and last["counts"]["rows"] == len(order.prompts),
        otherwise=f"order {order.number}, {order.ends} ends of {order.job_id}: {messages}",
    )


async def check_budget(account: Account, stack: Stack, orders: Sequence[Order]) -> None:
    """The team has the results that were accepted before its budget was used up, and no others."""
    accepted = {one for order in orders if order.team == SPENT for one in order.ids}
    rows = await stack.fetch("SELECT id::text FROM results WHERE team_id = $1", SPENT)
    contexts = await stack.fetch("SELECT id FROM contexts WHERE team_id = $1", SPENT)
    account.look(BUDGET, sum(order.team == SPENT for order in orders))
    if {row["id"] for row in rows} != accepted or len(contexts) != len(accepted):
        account.accuse(BUDGET, f"{len(rows)} results, {len(contexts)} contexts, {accepted}")
