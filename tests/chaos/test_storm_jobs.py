"""The account of a storm finds wrong counts, ends, keys and messages of jobs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from tests.chaos.storm.invariants import Account
from tests.chaos.storm.job_invariants import (
    JOB_ANNOUNCED,
    JOB_CANCELLED,
    JOB_COUNTS,
    JOB_KEYS,
    JOB_ROWS,
    Tables,
    check_jobs,
)
from tests.chaos.storm.orders import Order
from tests.integration.webhook_receiver import Call

Change = Callable[["State"], object]


@dataclass
class Received:
    """The calls of a receiver of webhooks."""

    calls: list[Call]


@dataclass
class State:
    """A job of two rows as clients, tables and webhooks have it."""

    order: Order
    tables: Tables
    receiver: Received


def message(name: str = "msg_j_1", **counts: int) -> Call:
    data = {"id": "j", "counts": {"rows": 2, "pending": 0} | counts}
    body = orjson.dumps({"type": "job.ended", "data": data})
    return Call("POST / HTTP/1.1", {"webhook-id": name}, body)


def row(key: str, place: int, end: str = "completed") -> dict[str, Any]:
    return {"job_id": "j", "key": key, "place": place, "ended_as": end, "result": end}


def make_state() -> State:
    order = Order(1, "job", "red", "plain", "scripted", ["a", "b"], ids=["x", "y"])
    order.job_id, order.ends = "j", 1
    job = {"id": "j", "ended_at": 1, "rows": 2, "ended": '{"completed": 1, "cancelled": 1}'}
    rows = [row("0", 1), row("1", 2, "cancelled")]
    return State(order, Tables([job], rows), Received([message(), message()]))


def check(state: State) -> Account:
    account = Account()
    receiver: Any = state.receiver
    check_jobs(account, [state.order], state.tables, receiver)
    return account


def test_a_right_job_is_not_found_fault_with() -> None:
    account = check(make_state())
    assert account.is_clean, account.found
    assert set(account.checked) == {
        JOB_ANNOUNCED,
        JOB_CANCELLED,
        JOB_COUNTS,
        JOB_KEYS,
        JOB_ROWS,
    }


def _set(table: str, number: int, **members: Any) -> Change:
    return lambda state: getattr(state.tables, table)[number].update(members)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        (JOB_COUNTS, _set("jobs", 0, rows=3)),
        (JOB_COUNTS, _set("jobs", 0, ended='{"completed": 2}')),
        (JOB_COUNTS, _set("jobs", 0, ended_at=None)),
        (JOB_ROWS, _set("rows", 0, result="model_error")),
        (JOB_ROWS, _set("rows", 0, place=2)),
        (JOB_ROWS, _set("rows", 0, place=None)),
        (JOB_CANCELLED, _set("rows", 1, ended_as=None, result="pending", place=None)),
        (JOB_KEYS, _set("rows", 1, key="0")),
        (JOB_KEYS, lambda state: state.tables.rows.append(row("2", 3))),
        (JOB_KEYS, lambda state: state.tables.jobs.clear()),
        (JOB_KEYS, lambda state: setattr(state.order, "is_deleted", True)),
        (JOB_ANNOUNCED, lambda state: state.receiver.calls.clear()),
        (JOB_ANNOUNCED, lambda state: state.receiver.calls.append(message("msg_j_2"))),
        (JOB_ANNOUNCED, lambda state: state.receiver.calls.append(message(pending=1))),
        (JOB_ANNOUNCED, lambda state: state.receiver.calls.append(message(rows=1))),
    ],
)
def test_a_wrong_job_is_found(what: str, change: Change) -> None:
    state = make_state()
    change(state)
    account = check(state)
    assert account.found.get(what), account.found
