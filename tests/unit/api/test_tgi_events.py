"""The events of /generate_stream: their times, and the members of the last one."""

from typing import Any

import orjson
import pytest

from app.api.tgi.response_schemas import EventWriter, sampled
from app.api.tgi.schemas import GenerateParameters, Generation
from app.inference.prompts import PromptFormat
from app.results.rows import ResultRow
from tests.result_rows import result_row

END = 9
KNOWN = PromptFormat(None, None, {}, 100, special_ids=frozenset({END}), end_ids=frozenset({END}))


def place(identifier: int, text: str) -> dict[str, Any]:
    return {str(identifier): {"logprob": -0.5, "rank": 1, "decoded_token": text}}


def row(output: str, finish_reason: str = "stop", **more: Any) -> ResultRow:
    return result_row(
        output=output, finish_reason=finish_reason, prompt_tokens=2, completion_tokens=3, **more
    )


def writer(known: PromptFormat | None = KNOWN, most: int | None = 10, **given: Any) -> EventWriter:
    parameters = GenerateParameters(details=True, **given)
    return EventWriter(Generation("in", parameters, False, known, most))


def read(frames: bytes) -> list[dict[str, Any]]:
    return [orjson.loads(frame.removeprefix(b"data:")) for frame in frames.split(b"\n\n") if frame]


def test_a_token_that_cannot_be_the_last_is_sent_at_once() -> None:
    writing = writer()
    (first,) = read(writing.add("a", [place(1, "a")]))
    assert first == {
        "index": 1,
        "token": {"id": 1, "text": "a", "logprob": -0.5, "special": False},
        "generated_text": None,
        "details": None,
    }
    assert len(read(writing.add("bc", [place(2, "b"), place(3, "c")]))) == 2


@pytest.mark.parametrize(
    ("known", "most", "given", "token", "reason", "reported"),
    [
        (KNOWN, 10, {}, place(END, "</s>"), "stop", "eos_token"),
        (KNOWN, 2, {}, place(2, "b"), "length", "length"),
        (KNOWN, 10, {"stop": ["ab"]}, place(2, "b"), "stop", "stop_sequence"),
        (None, 10, {}, place(2, "b"), "stop", "eos_token"),
        (KNOWN, None, {}, place(2, "b"), "length", "length"),
    ],
)
def test_one_that_may_be_the_last_is_sent_with_the_whole_text(
    known: PromptFormat | None,
    most: int | None,
    given: dict[str, Any],
    token: dict[str, Any],
    reason: str,
    reported: str,
) -> None:
    writing = writer(known, most, **given)
    frames = writing.add("a", [place(1, "a")]) + writing.add("b", [token])
    assert [event["index"] for event in read(frames)] == [1]
    (last,) = read(writing.end(row("ab", reason)))
    assert last["index"] == 2
    assert last["generated_text"] == "ab"
    assert last["details"] == {
        "finish_reason": reported, "generated_tokens": 3, "seed": None, "input_length": 2,
    }  # fmt: skip
    assert last["token"]["special"] == (str(END) in token)


def test_a_held_token_that_was_not_the_last_comes_with_the_next() -> None:
    writing = writer()
    assert writing.add("", [place(END, "</s>")]) == b""
    events = read(writing.add("a", [place(1, "a")]))
    assert [(event["index"], event["token"]["id"]) for event in events] == [(1, END), (2, 1)]


def test_an_unexpected_end_sends_the_last_token_without_text() -> None:
    writing = writer()
    (reported,) = read(writing.add("a", [place(1, "a")]))
    (last,) = read(writing.end(row("a")))
    assert last["token"] == reported["token"] | {"text": ""}
    assert (last["index"], last["generated_text"]) == (1, "a")


def test_a_stream_without_any_token_is_an_error() -> None:
    (last,) = read(writer().end(row("")))
    assert last["error_type"] == "incomplete_generation_stream"


def test_the_chosen_token_is_the_marked_one_or_the_first() -> None:
    first, second = {"logprob": -1.0}, {"logprob": -2.0, "sampled": True}
    assert sampled({"1": first, "2": second}) == ("2", second)
    assert sampled({"1": first}) == ("1", first)
