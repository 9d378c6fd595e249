"""The account of a storm finds wrong vectors, scores, log probabilities, images and reused texts."""

import struct
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson
import pytest

from tests.chaos.storm.invariants import (
    IMAGES,
    LOST,
    SCORES,
    SEEN,
    VECTORS,
    Account,
    Ledger,
    check,
)
from tests.chaos.storm.model_answers import stored_numbers
from tests.chaos.storm.orders import Order, draw
from tests.chaos.storm.reuse_invariants import FOUND, REUSED, check_reuse
from tests.images import BLUE, RED, data_uri, png_uri

NOW = datetime.now(UTC)
TEXT = "Order 1.0 amber basil"
SCRIPT = "Order 1.0 {{chunks=2}}"
QUERY = "amber cedar"
URIS = [png_uri(RED), png_uri(BLUE)]

Row = dict[str, Any]
CANCELLED: Row = {"state": "failed", "error_code": "cancelled"}


def make_row(kind: str, asked: str, parameters: Row, **changes: Any) -> Row:
    """A completed row with the model's answer."""
    row = {
        "id": "x", "team_id": "red", "model_name": "m", "state": "completed", "attempt": 1, "kind": kind,
        "output": None, "error_code": None, "finished_at": NOW, "deadline_at": NOW, "prompt": None,
        "parameters": orjson.dumps(parameters).decode(), "asked": asked, "delivery": None,
        "vector": None, "prompt_logprobs": None, "reused_from": None, "named": None,
    } | changes  # fmt: skip
    answer = Ledger([]).expected(row)
    assert answer
    scored = answer.prompt_logprobs
    row["prompt_logprobs"] = None if scored is None else orjson.dumps(scored).decode()
    row["vector"] = answer.vector
    row["output"] = answer.text if kind == "generation" else None
    return row


def make_embedding() -> Row:
    return make_row("embedding", TEXT, {"task": "embed"})


def make_score() -> Row:
    prompt = orjson.dumps([QUERY, TEXT]).decode()
    messages = orjson.dumps(
        [{"role": "query", "content": QUERY}, {"role": "document", "content": TEXT}]
    )
    return make_row("score", messages.decode(), {"task": "score"}, prompt=prompt)


def make_scored() -> Row:
    return make_row("generation", SCRIPT, {"max_tokens": 1, "prompt_logprobs": 2})


def make_seen() -> Row:
    """A chat with two images."""
    message = {"role": "user", "content": SCRIPT, "images": [{"url": uri} for uri in URIS]}
    parameters = {"images": [{}, {}], "max_tokens": 4}
    return make_row(
        "generation", orjson.dumps([message]).decode(), parameters, prompt=f"<user> {SCRIPT}"
    )


def make_order(row: Row) -> Order:
    """An order whose client received this row's numbers."""
    order = Order(1, "native", "red", "plain", "m", [SCRIPT if row["output"] else TEXT], key="k")
    order.ids, order.query = ["x"], QUERY if row["kind"] == "score" else ""
    order.images = URIS if "images" in row["parameters"] else []
    numbers = stored_numbers(row)
    order.numbers = [] if numbers is None else [numbers]
    return order


KINDS: list[Callable[[], Row]] = [make_embedding, make_score, make_scored, make_seen]


@pytest.mark.parametrize("make", KINDS)
def test_right_results_are_not_found_fault_with(make: Callable[[], Row]) -> None:
    account = Account()
    check(account, [make_order(make())], Ledger([make()]))
    assert account.is_clean, account.found


@pytest.mark.parametrize("change", [{}, {"vector": None}])
def test_a_cancelled_result_may_have_its_vector(change: Row) -> None:
    account, row = Account(), make_embedding() | CANCELLED | change
    order = make_order(row)
    order.intent = "cancel"
    check(account, [order], Ledger([row]))
    assert account.is_clean, account.found


def _short(row: Row) -> Row:
    return {"vector": row["vector"][:-4]}


def _doubled(row: Row) -> Row:
    return {"vector": row["vector"] * 2}


def _rounded(row: Row) -> Row:
    last = struct.unpack("<f", row["vector"][-4:])[0]
    return {"vector": row["vector"][:-4] + struct.pack("<f", last * 1.001)}


def _without_images(row: Row) -> Row:
    """The text of a chat whose images the model did not see."""
    blind = make_row("generation", row["asked"], {"max_tokens": 4}, prompt=row["prompt"])
    return {"output": blind["output"]}


def _in_other_order(row: Row) -> Row:
    messages = orjson.loads(row["asked"])
    messages[0]["images"].reverse()
    asked = orjson.dumps(messages).decode()
    other = make_row("generation", asked, orjson.loads(row["parameters"]), prompt=row["prompt"])
    return {"output": other["output"]}


def _other_image(row: Row) -> Row:
    return {"asked": row["asked"].replace(URIS[1], data_uri(b"other"))}


@pytest.mark.parametrize(
    ("what", "make", "change"),
    [
        (VECTORS, make_embedding, lambda _: {"vector": None}),
        (VECTORS, make_embedding, _short),
        (VECTORS, make_embedding, _doubled),
        (VECTORS, make_embedding, _rounded),
        (VECTORS, make_embedding, lambda _: {"state": "failed", "error_code": "model_error"}),
        (VECTORS, make_embedding, lambda row: CANCELLED | _short(row)),
        (VECTORS, make_scored, lambda _: CANCELLED | {"vector": struct.pack("<f", 0.25)}),
        (VECTORS, make_score, lambda _: {"vector": struct.pack("<f", 0.25)}),
        (VECTORS, make_scored, lambda _: {"vector": struct.pack("<f", 0.25)}),
        (SCORES, make_scored, lambda _: {"prompt_logprobs": None}),
        (SCORES, make_scored, lambda _: {"prompt_logprobs": "[null]"}),
        (SCORES, make_seen, lambda _: {"prompt_logprobs": "[null]"}),
        (IMAGES, make_seen, _without_images),
        (IMAGES, make_seen, _in_other_order),
        (IMAGES, make_seen, _other_image),
        (LOST, make_seen, _other_image),
        (LOST, make_score, lambda row: {"asked": row["asked"].replace(QUERY, "amber")}),
    ],
)
def test_wrong_results_are_found(
    what: str, make: Callable[[], Row], change: Callable[[Row], Row]
) -> None:
    account, row = Account(), make()
    check(account, [make_order(row)], Ledger([row | change(row)]))
    assert account.found.get(what), account.found


@pytest.mark.parametrize("make", KINDS[:3])
def test_numbers_that_a_client_received_are_the_stored_ones(make: Callable[[], Row]) -> None:
    account, row = Account(), make()
    order = make_order(row)
    order.numbers[0] = order.numbers[0][:-1]
    check(account, [order], Ledger([row]))
    assert list(account.found) == [SEEN]


def _reused() -> tuple[Row, Row]:
    """A completed result, and the one that its text answered."""
    source = make_row("generation", "Equal 0 {{chunks=2}}", {"temperature": 0})
    reused = source | {"id": "y", "attempt": 0, "reused_from": "x"}
    return source, reused


def _account_of(source: Row, reused: Row) -> Account:
    order = Order(1, "equal requests", "red", "plain", "m", ["", ""], ids=["x", "y"])
    order.sources, order.reused = {"y": "x"}, ["y"]
    account = Account()
    check_reuse(account, [order], Ledger([source, reused]))
    return account


def test_a_right_reuse_is_not_found_fault_with() -> None:
    account = _account_of(*_reused())
    assert account.is_clean, account.found
    assert account.checked == {REUSED: 2, FOUND: 1}


@pytest.mark.parametrize(
    ("what", "of_source", "of_reused"),
    [
        (REUSED, {"team_id": "blue"}, {}),
        (REUSED, {"id": "z"}, {}),
        (REUSED, {"state": "pending"}, {}),
        (REUSED, {"state": "failed"}, {}),
        (REUSED, {"reused_from": "w"}, {}),
        (REUSED, {"finished_at": NOW + timedelta(seconds=1)}, {}),
        (REUSED, {"asked": "Equal 1"}, {}),
        (REUSED, {"parameters": '{"temperature": 0, "max_tokens": 3}'}, {}),
        (REUSED, {}, {"output": "else"}),
        (REUSED, {}, {"attempt": 1}),
        (REUSED, {}, {"state": "pending"}),
        (REUSED, {}, {"reused_from": "z"}),
        (FOUND, {}, {"reused_from": None}),
    ],
)
def test_a_wrong_reuse_is_found(what: str, of_source: Row, of_reused: Row) -> None:
    source, reused = _reused()
    account = _account_of(source | of_source, reused | of_reused)
    assert account.found.get(what), account.found


def test_a_seed_decides_the_newer_kinds_too() -> None:
    orders = [draw("a", number, with_vllm=False) for number in range(2000)]
    assert orders == [draw("a", number, with_vllm=False) for number in range(2000)]
    equal = [order for order in orders if order.dialect == "equal requests"]
    assert {order.team for order in equal} == {"red", "blue"}
    assert {order.intent for order in equal} == {"plain", "cancel", "fail"}
    plain = {order.prompts[0] for order in equal if order.intent == "plain"}
    assert len(plain) < len(equal) / 2
    assert {len(order.images) for order in orders} == {0, 1, 2}
