"""The results that may be continued, and the part of a reader's text that stays."""

from typing import Any

import pytest

from app.queue.continuation import Resume, can_continue
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


def test_the_rest_of_a_budget() -> None:
    parameters = {"max_tokens": 10, "min_tokens": 3, "temperature": 0}
    assert rest_of(parameters, 2) == {"max_tokens": 8, "min_tokens": 1, "temperature": 0}
    assert rest_of(parameters, 5) == {"max_tokens": 5, "min_tokens": 0, "temperature": 0}
    assert parameters["max_tokens"] == 10
