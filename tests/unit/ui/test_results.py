"""Results as pages show them: what is missing, what is long."""

from typing import Any

import pytest

from app.ui.results import MAX_SHOWN_CHARACTERS, one_line, outcome, to_view

BARE: dict[str, Any] = {
    "id": "0199a0f2-7c5d-7b3a-a1c5-e0f1d2c3b4a5",
    "kind": "generation",
    "state": "completed",
    "result": "",
    "error": None,
    "usage": None,
    "finish_reason": None,
    "attempt": 1,
    "created_at": "2026-11-22T08:30:00+00:00",
    "started_at": None,
    "first_token_at": None,
    "finished_at": None,
}


@pytest.mark.asyncio
async def test_of_a_long_text_the_beginning_is_shown() -> None:
    view = await to_view(BARE | {"result": "x" * 150_000}, "rendered")
    assert (len(view["text"]), view["length"], view["html"]) == (
        MAX_SHOWN_CHARACTERS,
        150_000,
        None,
    )


@pytest.mark.asyncio
async def test_members_that_the_api_leaves_out_are_none() -> None:
    view = await to_view(BARE)
    assert (view["erased_at"], view["source_id"], view["attribution"]) == (None, None, None)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"result": " two\n lines "}, "two lines"),
        ({"result": None, "state": "pending"}, "Not answered yet"),
        ({"result": None, "kind": "attribution"}, "The documents that it found"),
        ({"erased_at": "2026-11-22T08:30:00+00:00"}, "Its texts were erased"),
        ({"state": "failed", "error": {"code": "new", "message": "m" * 999}}, "m" * 200),
        ({}, "An empty answer"),
    ],
)
def test_a_result_in_a_line(members: dict[str, Any], words: str) -> None:
    assert outcome(BARE | members) == words


def test_a_line_is_short_for_all_texts() -> None:
    assert len(one_line("word " * 1_000_000)) <= 200
    assert one_line(None) == ""
