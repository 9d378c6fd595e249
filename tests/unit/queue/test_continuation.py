"""The results that may be continued, and the part of a reader's text that stays."""

from typing import Any, cast

import pytest
from asyncpg import Record

from app.core.ids import new_id
from app.queue.continuation import Interrupted, Resume, _to_resume, can_continue
from app.worker.backends.triton_backend import rest_of


@pytest.mark.parametrize(
    ("parameters", "can"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, True),
        ({"stop": ["x"], "stop_token_ids": [1], "min_tokens": 3, "ignore_eos": True}, True),
        ({"logit_bias": {"1": 2.0}}, True),
        ({"n": 1}, True),
        ({"n": 2}, False),
        ({"structured_outputs": {"json_object": True}}, False),
        ({"logprobs": 0}, False),
        ({"logprobs": 5}, False),
        ({"logprobs": None}, True),
        ({"prompt_logprobs": 0}, False),
        ({"presence_penalty": 0.0, "frequency_penalty": 0, "repetition_penalty": 1.3}, True),
        ({"presence_penalty": 0.1}, False),
        ({"frequency_penalty": -0.1}, False),
        ({"bad_words": []}, True),
        ({"bad_words": ["x"]}, False),
        ({"seed": 1}, False),
        ({"seed": 0, "temperature": 1.0}, False),
        ({"seed": 0, "temperature": 0}, True),
        ({"seed": 0, "temperature": 0.0}, True),
        ({"seed": None, "temperature": 1.0}, True),
    ],
)
def test_what_may_be_continued(parameters: dict[str, Any], *, can: bool) -> None:
    assert can_continue({"max_tokens": 5} | parameters) is can


@pytest.mark.parametrize(
    ("attempt", "offset", "kept"),
    [
        (2, 5, 0),  # of a text that was dropped
        (3, 5, 5),
        (3, 10, 10),
        (3, 12, 10),  # of which the end was never stored
        (4, 12, 10),  # it stored nothing
        (5, 12, 12),
        (5, 40, 20),
        (6, 40, 20),
    ],
)
def test_how_much_of_a_readers_text_stays(attempt: int, offset: int, kept: int) -> None:
    resume = Resume("x" * 20, None, None, 4, begins=((3, 0), (5, 10)))
    assert resume.kept_of(attempt, offset) == kept


TEXT_ROW: dict[str, Any] = {
    "text": "abc", "fits": True, "token_ids": b"\0" * 12, "prompt_tokens": 2, "completion_tokens": 3,
    "attempts": [1, 2], "offsets": [0, 2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("columns", "later", "fault"),
    [
        ({}, [], None),
        ({}, [True], None),
        ({}, [False, False, False], None),  # none of them was lost
        ({}, [True, False], None),
        ({}, [True, True], "2 attempts to continue it were lost"),
        ({}, [True, False, True], "2 attempts to continue it were lost"),
        ({"completion_tokens": 10}, [], None),
        ({"completion_tokens": 11}, [], "longer than max_tokens"),
        ({"fits": False}, [True, True], "a gap or an overlap"),
    ],
)
def test_stored_text_is_continued_unless_it_loses_attempts_or_is_broken(
    columns: dict[str, Any], later: list[bool], fault: str | None
) -> None:
    """`later`: whether each attempt behind the last text is counted; those before it do not matter."""
    history = [{"attempt": n, "counted": c} for n, c in enumerate([True, True, *later], 1)]
    lost = Interrupted(new_id(), len(history) + 1, 1, max_tokens=10, history=history)
    resume = _to_resume(lost, cast(Record, TEXT_ROW | columns))
    assert (resume.text, resume.begins) == (("", ()) if fault else ("abc", ((1, 0), (2, 2))))
    assert (resume.fault is None) is (fault is None)
    assert (fault or "") in (resume.fault or "")


@pytest.mark.parametrize(
    ("token_ids", "are_known"),
    [(b"\0" * 12, True), (b"\0" * 8, False), (b"\0" * 16, False), (None, False)],
)
def test_token_ids_are_known_of_all_tokens_or_of_none(
    token_ids: bytes | None, *, are_known: bool
) -> None:
    lost = Interrupted(new_id(), 3, 1, max_tokens=10, history=[])
    resume = _to_resume(lost, cast(Record, TEXT_ROW | {"token_ids": token_ids}))
    assert (resume.text, resume.token_ids) == ("abc", token_ids if are_known else None)


def test_text_that_is_gone_is_a_fault() -> None:
    resume = _to_resume(Interrupted(new_id(), 3, 1, max_tokens=10, history=[]), None)
    assert (resume.text, resume.fault) == ("", "its stored text is gone")


def test_the_rest_of_a_budget() -> None:
    parameters = {"max_tokens": 10, "min_tokens": 3, "temperature": 0}
    assert rest_of(parameters, 2) == {"max_tokens": 8, "min_tokens": 1, "temperature": 0}
    assert rest_of(parameters, 5) == {"max_tokens": 5, "min_tokens": 0, "temperature": 0}
    assert parameters["max_tokens"] == 10
