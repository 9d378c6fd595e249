"""Output of a session's slots, joined until it is sent."""

import json
from typing import Any

from tests.unit.vllm_backend.modules import load

slots = load("session_slots")


def make_slot(number: int, text: str = "x") -> Any:
    slot = slots.Slot(number, live=False, returns_ids=True)
    slot.add(text, [number])
    return slot


def test_a_slot_joins_its_steps() -> None:
    slot = slots.Slot(3, live=False, returns_ids=True, event={"prompt_tokens": 4})
    assert not slot.has_output
    slot.add("é", [1], '[{"1": 0}]')
    slot.add("", [2])
    slot.add("b", [3, 4], '[{"3": 0}, {"4": 0}]')
    output = slot.take()
    assert (output.slot, output.text, output.tokens) == (3, "éb", 4)
    assert output.token_ids == [1, 2, 3, 4]
    assert json.loads(output.logprobs) == [{"1": 0}, {"3": 0}, {"4": 0}]
    assert output.event == {"prompt_tokens": 4}
    assert slot.take() == slots.Output(3, "", 0, [], "", {})
    assert slot.has_output
    slot.add("c", [5])
    assert slot.take() == slots.Output(3, "c", 1, [5], "", {})
    assert output.token_ids == [1, 2, 3, 4]


def test_token_ids_that_nothing_requests_are_only_counted() -> None:
    slot = slots.Slot(1, live=True, returns_ids=False)
    slot.add("ab", [1, 2])
    assert slot.take() == slots.Output(1, "ab", 2, [], "", {})


def test_json_lists_are_joined() -> None:
    assert slots.join_lists([]) == ""
    assert slots.join_lists(["[]"]) == "[]"
    assert json.loads(slots.join_lists(["[]", "[1]", "[]", "[2, 3]"])) == [1, 2, 3]
    assert json.loads(slots.join_lists(["[]", "[]"])) == []


def test_a_response_has_as_many_slots_as_fit_and_at_least_one() -> None:
    most = slots.MAX_RESPONSE_BYTES
    sizes = [most // 4, 1, most // 4 - 2, 1, 1, most, 0]
    due = {number: make_slot(number, "x" * size) for number, size in enumerate(sizes, start=1)}
    responses = []
    while due:
        responses.append([output.slot for output in slots.take_response(due)])
    assert responses == [[1], [2, 3, 4], [5], [6], [7]]


def test_the_size_of_a_response_counts_bytes_and_log_probabilities() -> None:
    slot = make_slot(1, "€")
    assert slot.size >= len("€".encode())
    slot.add("", [2], "[1]")
    assert slot.size >= len("€".encode()) + len("[1]")
    slot.take()
    assert slot.size == 0


def test_log_probabilities_of_the_prompt_are_taken_once_and_count() -> None:
    slot = make_slot(1)
    size = slot.size
    slot.add_prompt("[null]")
    assert slot.size == size + len("[null]")
    assert slot.take().prompt_logprobs == "[null]"
    assert slot.take().prompt_logprobs == ""
