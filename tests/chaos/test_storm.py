"""A short storm (`make chaos` is the long one), and that its account finds what it looks for."""

import logging
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from app.core.logs import TextFormatter
from tests.chaos.history import first_traceback
from tests.chaos.storm import report, storm
from tests.chaos.storm.faults import plan
from tests.chaos.storm.invariants import (
    CLIENTS,
    DOUBLED,
    ENDS,
    LOST,
    SEEN,
    STUCK,
    WRONG,
    Account,
    Ledger,
    check,
)
from tests.chaos.storm.orders import Order, draw
from tests.chaos.storm.outcome import Options

PARTS = {"api": "service", "bob": "service", "Triton 1": "Triton", "PostgreSQL": "PostgreSQL",
         "a - b": "network"}  # fmt: skip


@pytest.mark.timeout(300)
async def test_a_short_storm(tmp_path: Path) -> None:
    """Everything fails, and nothing is lost, doubled, stuck or wrong."""
    tmp_path.chmod(0o755)
    outcome = await storm.run(tmp_path, Options("short", 15, 24, 1.2), print)
    text = report.to_markdown(outcome)
    assert outcome.account.is_clean, text
    assert len(outcome.faults) >= 8, text
    assert outcome.figures["results"] >= 150, text


def test_a_seed_decides_failures_and_requests() -> None:
    first, again, other = (plan(seed, 600, PARTS, 4) for seed in ("a", "a", "b"))
    assert first == again != other
    assert len({(fault.what, PARTS[fault.part]) for fault in first}) == 14
    orders = [draw(seed, 7, with_vllm=True) for seed in ("a", "a", "b")]
    assert orders[0] == orders[1] != orders[2]


NOW = datetime.now(UTC)
PROMPT = "Order 1.0 {{chunks=2}}"


def make_row(**changes: Any) -> dict[str, Any]:
    row = {
        "id": "x", "team_id": "red", "model_name": "scripted", "state": "completed", "attempt": 1,
        "output": None, "error_code": None, "finished_at": NOW, "deadline_at": NOW, "prompt": None,
        "parameters": "{}", "asked": PROMPT, "delivery": None, "kind": "generation", "vector": None,
        "prompt_logprobs": None, "reused_from": None, "named": None,
    }  # fmt: skip
    answer = Ledger([]).expected(row)
    assert answer
    return row | {"output": answer.text} | changes


def make_order(**changes: Any) -> Order:
    return Order(1, "native", "red", "plain", "scripted", [PROMPT], key="k", ids=["x"], **changes)


def test_what_is_right_is_not_found_fault_with() -> None:
    account = Account()
    check(account, [make_order()], Ledger([make_row()]))
    assert account.is_clean, account.found


@pytest.mark.parametrize(
    ("what", "rows", "order"),
    [
        (LOST, list, make_order()),
        (LOST, lambda: [make_row(asked="Order 1.0 {{chunks=3}}")], make_order()),
        (LOST, lambda: [make_row(team_id="blue")], make_order()),
        (DOUBLED, lambda: [make_row(), make_row(id="y")], make_order()),
        (DOUBLED, lambda: [make_row(), make_row(id="y", asked="Order 2.0 ")], make_order()),
        (STUCK, lambda: [make_row(state="pending", finished_at=None)], make_order()),
        (STUCK, lambda: [make_row(deadline_at=NOW - timedelta(minutes=1))], make_order()),
        (WRONG, lambda: [make_row(output="something else")], make_order()),
        (WRONG, lambda: [make_row(output=make_row()["output"][:-1])], make_order()),
        (ENDS, lambda: [make_row(state="failed", error_code="engine_lost")], make_order()),
        (SEEN, lambda: [make_row()], make_order(texts=["somet"])),
        (SEEN, lambda: [make_row()], make_order(texts=[""], is_whole=True)),
        (SEEN, lambda: [make_row()],
         make_order(finals={"x": {"state": "failed", "result": "", "error": None}})),
        (CLIENTS, lambda: [make_row()], make_order(faults=["no answer"])),
        (CLIENTS, lambda: [make_row()], make_order(refusal="500")),
    ],
)  # fmt: skip
def test_what_is_wrong_is_found(
    what: str, rows: Callable[[], list[dict[str, Any]]], order: Order
) -> None:
    account = Account()
    check(account, [order], Ledger(rows()))
    assert account.found.get(what), account.found


def test_a_traceback_in_a_log_is_found() -> None:
    """By the service's own format, and by Python's."""
    record = logging.makeLogRecord({"msg": "an attempt broke", "levelname": "ERROR"})
    line = TextFormatter().format(record)
    assert not first_traceback(f"{line}\n")
    try:
        raise ValueError("unforeseen")
    except ValueError:
        record.exc_info = sys.exc_info()
        printed = traceback.format_exc()
    for found in (TextFormatter().format(record), f"{line}\n{printed}"):
        assert "ValueError: unforeseen" in first_traceback(f"{line}\n{found}\n")
