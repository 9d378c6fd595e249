"""The account after a storm: checks the clients' responses against the database."""

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from tests.chaos.storm.model_answers import Answer, ModelAnswers, Row, stored_numbers
from tests.chaos.storm.orders import Order
from tests.integration.webhook_receiver import Receiver

# How late a result may be ended for its deadline: a sweep is due every second, and does not run
# while the database or its supervisor is unavailable; the longest faults, and their recovery.
LATE_SECONDS = 30.0
_MOST_EXAMPLES = 5
_NAME = re.compile(r"Order (\d+\.\d+) ")

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
  r.kind, r.vector, r.prompt_logprobs, r.reused_from::text, r.metadata ->> 'order' AS named,
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
IMAGES = "0 wrong images: the stored text is the model's output for the images of its request"
VECTORS = "0 wrong vectors: each vector and score is the model's, and no result that failed has one"
SCORES = "0 wrong scores: a prompt's log probabilities are the model's"
SEEN = "each text that a client received is the stored one, or its beginning"
ENDS = "every result ended as its kind may"
CLIENTS = "no client received a forbidden response, or waited without bound"
WEBHOOKS = "every webhook that was asked for was called, after its result's end, with its state"
TEAMS = "each team has its own results, and none of the other's"
COUNTED = "every end is in the minutes' totals once"
USED = "the ledger of usage has every end once, with its tokens, team and key"


class Ledger:
    """The rows of a database after a storm, and their expected content."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.by_id: dict[str, Row] = {row["id"]: row for row in rows}
        self.by_name: defaultdict[str, list[Row]] = defaultdict(list)
        self._answers = ModelAnswers()
        for row in rows:
            self.by_name[name_of(row)].append(row)

    def expected(self, row: Row) -> Answer | None:
        """The model's whole answer to a row's request; None for a real engine."""
        return self._answers.of(row)


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


def _check_row(account: Account, row: Row, expected: Answer | None) -> None:
    if expected is not None:
        _check_answer(account, row, expected)
    account.require(STUCK, holds=row["state"] != "pending", otherwise=f"{row['id']} is pending")
    if row["finished_at"] is not None and row["deadline_at"] is not None:
        late = (row["finished_at"] - row["deadline_at"]).total_seconds()
        account.require(STUCK, holds=late < LATE_SECONDS, otherwise=f"{row['id']}: {late:.1f} s")


def _check_answer(account: Account, row: Row, expected: Answer) -> None:
    """A completed result has the whole answer; of a failed one's text, the beginning may be stored."""
    output, is_completed = row["output"] or "", row["state"] == "completed"
    is_right = output == expected.text if is_completed else expected.text.startswith(output)
    what = IMAGES if "images" in orjson.loads(row["parameters"]) else WRONG
    account.require(what, holds=is_right, otherwise=f"{row['id']}: {output[:200]}")
    if expected.vector is not None or row["vector"] is not None:
        allowed = {expected.vector if is_completed else None}
        if row["error_code"] == "cancelled":  # its answer may have come before its end, as a text's
            allowed = {None, expected.vector}
        account.require(
            VECTORS, holds=row["vector"] in allowed, otherwise=f"{row['id']}: {row['vector']!r}"
        )
    if expected.prompt_logprobs is not None or row["prompt_logprobs"] is not None:
        found = stored_numbers(row)
        holds = found == expected.prompt_logprobs or (found is None and not is_completed)
        account.require(SCORES, holds=holds, otherwise=f"{row['id']}: {str(found)[:200]}")


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
                holds=all(part in row["asked"] for part in (prompt, order.query, *order.images))
                and row["team_id"] == order.team,
                otherwise=f"{_of(order)}: {row['id']} asks {row['asked'][:200]}",
            )


def _check_told(
    account: Account, order: Order, place: int, result_id: str, name: str, ledger: Ledger
) -> None:
    row = ledger.by_id.get(result_id)
    if row is None or name_of(row) != name:
        account.accuse(LOST, f"{_of(order)}: received {result_id}, which is {row and name_of(row)}")
        return
    account.look(LOST)
    if final := order.finals.get(result_id):
        reported = (
            *(final["state"], final["result"], (final["error"] or {}).get("code")),
            *(final.get("prompt_logprobs"), final.get("reused_from")),
        )
        stored = _as_reported(row)
        account.require(
            SEEN, holds=reported == stored, otherwise=f"{_of(order)}: {reported}, {stored}"
        )
    if place < len(order.numbers):
        numbers, kept = order.numbers[place], stored_numbers(row)
        account.require(
            SEEN, holds=numbers == kept, otherwise=f"{_of(order)}: {numbers}, {kept}"[:400]
        )
    if place < len(order.texts):
        text, expected = order.texts[place], ledger.expected(row)
        # Text is shown before it is stored: of what was lost, more may have been seen than is kept.
        whole = text if expected is None else expected.text
        holds = text == row["output"] if order.is_whole else whole.startswith(text)
        account.require(SEEN, holds=holds, otherwise=f"{_of(order)}: {text[:200]}")
    if order.refusal:
        account.require(
            CLIENTS,
            holds=row["state"] == "failed" or order.dialect in _AWAITED,
            otherwise=f"{_of(order)}: {order.refusal}, but {result_id} is {row['state']}",
        )


def _as_reported(row: Row) -> tuple[Any, ...]:
    """The members of a result that a client compares."""
    numbers = stored_numbers(row)
    found, scored = row["output"], numbers if row["kind"] == "generation" else None
    if row["kind"] != "generation":
        name, value = (
            ("score", numbers and numbers[0]) if row["kind"] == "score" else ("embedding", numbers)
        )
        found = None if numbers is None else {name: value}
    return row["state"], found, row["error_code"], scored, row["reused_from"]


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


def name_of(row: Row) -> str:
    """The place of its prompt among all orders': its metadata have it if its text has none."""
    if row["named"] is not None:
        return str(row["named"])
    found = _NAME.search(row["asked"])
    return found[1] if found else ""


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
