"""The account after a storm: checks the clients' responses against the database."""

import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson

from tests.chaos.storm.orders import SCRIPTED, Order
from tests.integration.webhook_receiver import Receiver

# How late a result may be ended for its deadline: a sweep is due every second, and does not run
# while the database or its supervisor is unavailable; the longest faults, and their recovery.
LATE_SECONDS = 30.0
_MOST_EXAMPLES = 5
_NAME = re.compile(r"Order (\d+\.\d+) ")
_SCRIPT = Path(__file__).parents[3] / "triton" / "models" / "scripted" / "1" / "script.py"

# Permitted ends of a result by the intent of its order; other than "completed" with an error code.
_ENDS = {
    "plain": {"completed"},
    "cancel": {"completed", "cancelled"},
    "deadline": {"deadline_exceeded"},
    "fail": {"model_error"},
    "refuse": {"invalid_request"},
    "delete": {"completed"},
}
# A client that disconnects cancels; a lost API cancels its results. Only without a key.
_ENDS_OF_THE_LEFT = {"cancelled", "worker_lost"}
_AWAITED = ("OpenAI chat, streamed", "TGI generate_stream", "Tenstorrent")

ROWS = """
SELECT r.id::text, r.team_id, r.model_name, r.state, r.attempt, r.output, r.error_code, r.finished_at,
  r.deadline_at, r.parameters::text, r.prompt, coalesce(c.content, c.messages::text) AS asked,
  d.state AS delivery
FROM results r JOIN contexts c ON c.id = r.context_id
LEFT JOIN webhook_deliveries d ON d.result_id = r.id"""


@dataclass
class Account:
    """The invariants that were checked, each with what was found against it."""

    checked: dict[str, int] = field(default_factory=dict)  # of how many it was looked at
    found: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    def look(self, what: str, of: int = 1) -> None:
        """An invariant is checked, of so many."""
        self.checked[what] = self.checked.get(what, 0) + of

    def accuse(self, what: str, example: object) -> None:
        """It does not hold."""
        self.found[what].append(str(example))

    def require(self, what: str, *, holds: bool, otherwise: object) -> None:
        """Look at one case of an invariant."""
        self.look(what)
        if not holds:
            self.accuse(what, otherwise)

    @property
    def is_clean(self) -> bool:
        return not any(self.found.values())

    def examples(self, what: str) -> list[str]:
        """The first few of what was found against it."""
        return self.found[what][:_MOST_EXAMPLES] if what in self.found else []


LOST = "0 lost: every id that a client received exists, with its request"
DOUBLED = "0 doubled: an order is stored once, or not at all, and whole"
STUCK = f"0 stuck: everything has ended, none {LATE_SECONDS:.0f} s past its deadline"
WRONG = "0 wrong bytes: the stored text is the model's output"
SEEN = "each text that a client received is the stored one, or its beginning"
ENDS = "every result ended as its kind may"
CLIENTS = "no client received a forbidden response, or waited without bound"
WEBHOOKS = "every webhook that was asked for was called, after its result's end, with its state"
TEAMS = "each team has its own results, and none of the other's"
COUNTED = "every end is in the minutes' totals once"
USED = "the ledger of usage has every end once, with its tokens, team and key"


Row = Mapping[str, Any]


class Ledger:
    """The rows of a database after a storm, and their expected content."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by_id: dict[str, Row] = {row["id"]: row for row in rows}
        self.by_name: defaultdict[str, list[Row]] = defaultdict(list)
        self._script = _load_script()
        for row in rows:
            self.by_name[_name_of(row)].append(row)

    def expected(self, row: Row) -> str | None:
        """The model's whole output for a row's prompt, by the model's own pure function.

        None for a real engine, whose output differs each time.
        """
        if row["model_name"] != SCRIPTED:
            return None
        prompt = row["asked"] if row["prompt"] is None else row["prompt"]
        try:
            script = self._script.write_script(prompt, orjson.loads(row["parameters"]))
        except self._script.RefusedError:
            return ""
        return "".join(script.chunks)


def check(account: Account, orders: Sequence[Order], ledger: Ledger) -> None:
    """Check the clients' responses against the rows, and the rows against the model."""
    for row in ledger.by_id.values():
        _check_row(account, row, ledger.expected(row))
    known = set()
    for order in orders:
        names = [f"{order.number}.{item}" for item in range(len(order.prompts))]
        known.update(names)
        _check_count(account, order, names, ledger)
        for place, result_id in enumerate(order.ids):
            _check_told(account, order, place, result_id, names[place // order.choices], ledger)
        for name in names:
            for row in ledger.by_name[name]:
                _check_end(account, order, row)
        for fault in order.faults:
            account.accuse(CLIENTS, f"{_of(order)}: {fault}")
        account.look(CLIENTS)
    account.require(
        DOUBLED, holds=known >= ledger.by_name.keys(), otherwise="rows that no client requested"
    )


def _check_row(account: Account, row: Row, expected: str | None) -> None:
    output = row["output"] or ""
    if expected is not None:
        is_right = (
            output == expected if row["state"] == "completed" else expected.startswith(output)
        )
        account.require(WRONG, holds=is_right, otherwise=f"{row['id']}: {output[:200]}")
    account.require(STUCK, holds=row["state"] != "pending", otherwise=f"{row['id']} is pending")
    if row["finished_at"] is not None and row["deadline_at"] is not None:
        late = (row["finished_at"] - row["deadline_at"]).total_seconds()
        account.require(STUCK, holds=late < LATE_SECONDS, otherwise=f"{row['id']}: {late:.1f} s")


def _check_count(account: Account, order: Order, names: Sequence[str], ledger: Ledger) -> None:
    for name, prompt in zip(names, order.prompts, strict=True):
        rows = ledger.by_name[name]
        allowed = {order.choices} if order.ids else {0, order.choices}
        allowed |= {2} if order.is_retried else set()
        what = LOST if len(rows) < min(allowed) else DOUBLED
        account.require(
            what, holds=len(rows) in allowed, otherwise=f"{_of(order)}: {len(rows)} rows of {name}"
        )
        for row in rows:
            account.require(
                LOST,
                holds=prompt in row["asked"] and row["team_id"] == order.team,
                otherwise=f"{_of(order)}: {row['id']} asks {row['asked'][:200]}",
            )


def _check_told(
    account: Account, order: Order, place: int, result_id: str, name: str, ledger: Ledger
) -> None:
    row = ledger.by_id.get(result_id)
    if row is None or _name_of(row) != name:
        account.accuse(
            LOST, f"{_of(order)}: received {result_id}, which is {row and _name_of(row)}"
        )
        return
    account.look(LOST)
    if final := order.finals.get(result_id):
        reported = (final["state"], final["result"], (final["error"] or {}).get("code"))
        stored = (row["state"], row["output"], row["error_code"])
        account.require(
            SEEN, holds=reported == stored, otherwise=f"{_of(order)}: {reported}, {stored}"
        )
    if place < len(order.texts):
        text, expected = order.texts[place], ledger.expected(row)
        # Text is shown before it is stored: of what was lost, more may have been seen than is kept.
        holds = text == row["output"] if order.is_whole else (expected or text).startswith(text)
        account.require(SEEN, holds=holds, otherwise=f"{_of(order)}: {text[:200]}")
    if order.refusal:
        account.require(
            CLIENTS,
            holds=row["state"] == "failed" or order.dialect in _AWAITED,
            otherwise=f"{_of(order)}: {order.refusal}, but {result_id} is {row['state']}",
        )


def _check_end(account: Account, order: Order, row: Row) -> None:
    allowed = _ENDS[order.intent]
    if order.dialect in _AWAITED:
        allowed = allowed | _ENDS_OF_THE_LEFT
    end = row["error_code"] or row["state"]
    account.require(
        ENDS, holds=end in allowed, otherwise=f"{_of(order)}: {row['id']} ended as {end}"
    )


def _of(order: Order) -> str:
    return f"order {order.number} ({order.dialect}, {order.intent})"


def _name_of(row: Row) -> str:
    found = _NAME.search(row["asked"])
    return found[1] if found else ""


def _load_script() -> ModuleType:
    """The scripted model's text, which needs no Triton: `script.py` beside the model."""
    spec = importlib.util.spec_from_file_location("scripted_model_script", _SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def check_webhooks(
    account: Account, orders: Sequence[Order], ledger: Ledger, receiver: Receiver
) -> None:
    """Each result with a webhook had at least one call, and every call reports the stored end."""
    reported: defaultdict[str, set[str]] = defaultdict(set)
    for call in receiver.calls:
        event = orjson.loads(call.body)
        reported[event["data"]["id"]].add(event["data"]["state"])
    wanted = (order.ids for order in orders if order.wants_webhook)
    for result_id in (one for ids in wanted for one in ids):
        row = ledger.by_id.get(result_id)
        account.require(
            WEBHOOKS,
            holds=row is not None
            and reported[result_id] == {row["state"]}
            and row["delivery"] == "delivered",
            otherwise=f"{result_id}: received {reported[result_id]}, {row and dict(row)}",
        )
