"""Invariants of reuse after a storm: answers of equal requests come from a completed result of their team."""

from collections.abc import Sequence

from tests.chaos.storm.invariants import Account, Ledger
from tests.chaos.storm.model_answers import Row
from tests.chaos.storm.orders import Order

REUSED = "each reused result has the text of a completed, equal one of its team, and no attempt"
FOUND = "a request after the end of an equal one reuses its text"

_EQUAL = ("team_id", "model_name", "asked", "prompt", "output", "kind", "prompt_logprobs")


def check_reuse(account: Account, orders: Sequence[Order], ledger: Ledger) -> None:
    """Check each reused row against its source, and each order's last request."""
    for row in ledger.by_id.values():
        if row["reused_from"] is not None:
            source = ledger.by_id.get(row["reused_from"])
            account.require(
                REUSED, holds=_is_right(row, source), otherwise=f"{dict(row)} of {source}"[:1000]
            )
    for order in orders:
        for result_id, source_id in order.sources.items():
            stored = ledger.by_id.get(result_id)
            account.require(
                REUSED,
                holds=stored is not None and stored["reused_from"] == source_id,
                otherwise=f"order {order.number}: {result_id} of {source_id} is {stored}"[:1000],
            )
        for result_id in order.reused:
            found = ledger.by_id.get(result_id)
            account.require(
                FOUND,
                holds=found is not None and found["reused_from"] is not None,
                otherwise=f"order {order.number}: {result_id} is {found}"[:1000],
            )


def _is_right(row: Row, source: Row | None) -> bool:
    return (
        source is not None
        and all(row[name] == source[name] for name in _EQUAL)
        and row["parameters"] == source["parameters"]
        and (row["state"], row["attempt"]) == ("completed", 0)
        and source["state"] == "completed"
        and source["attempt"] > 0
        and source["reused_from"] is None
        and source["finished_at"] <= row["finished_at"]
    )
