"""Bounds of a request that need no I/O: the last value that is accepted, and the first that is not."""

from collections.abc import Callable, Mapping
from typing import Any
from uuid import UUID

import pytest

from app.core.errors import InvalidRequestError
from app.core.settings import Settings
from app.inference.model_registry import Model
from app.inference.sampling import SamplingParameters
from app.results import choices
from app.results.choices import characters_of, check_choices
from app.results.drafts import (
    GroupRequest,
    Prompt,
    SubmissionDraft,
    check_logprobs,
    validate,
)
from app.results.requests import SendOptions
from app.results.token_budget import count_tokens, generated_tokens

SETTINGS = Settings.model_construct(default_deadline_seconds=50.0, max_deadline_seconds=100.0)


def field_of(check: Callable[[], object]) -> str | None:
    """The field that a check refuses."""
    try:
        check()
    except InvalidRequestError as error:
        return error.errors[0].field
    return None


@pytest.mark.parametrize(
    ("options", "most", "field"),
    [
        ({"deadline_seconds": 100.0}, None, None),
        ({"deadline_seconds": 100.5}, None, "deadline_seconds"),
        ({"priority": 5}, None, None),
        ({"priority": 6}, None, "priority"),
        ({"retain_seconds": 600.0}, None, None),
        ({"retain_seconds": 600.0}, 600.0, None),
        ({"retain_seconds": 600.5}, 600.0, "retain_seconds"),
        ({}, 600.0, None),
        ({"webhook_url": "https://example.com/hook"}, None, None),
        ({"webhook_url": "ftp://example.com/hook"}, None, "webhook_url"),
    ],
)
def test_an_option_may_reach_its_bound(
    options: dict[str, Any], most: float | None, field: str | None
) -> None:
    send = SendOptions.model_construct(**options)
    assert field == field_of(
        lambda: validate(send, SETTINGS, max_priority=5, max_retain_seconds=most)
    )


@pytest.mark.parametrize(
    ("constraint", "is_on", "is_accepted"),
    [
        (None, False, True),
        ({"regex": "a+"}, False, True),
        ({"grammar": "root ::= x"}, False, False),
        ({"grammar": "root ::= x"}, True, True),
    ],
)
def test_grammars_are_the_operators_choice(constraint: Any, is_on: bool, is_accepted: bool) -> None:
    send = SendOptions(parameters=SamplingParameters(structured_outputs=constraint))
    settings = SETTINGS.model_copy(update={"ebnf_grammars": is_on})
    field = field_of(lambda: validate(send, settings, max_priority=5, max_retain_seconds=None))
    assert field == (None if is_accepted else "parameters.structured_outputs.grammar")


def test_the_default_deadline_is_bounded_as_any_other() -> None:
    settings = SETTINGS.model_copy(update={"default_deadline_seconds": 101.0})
    check = field_of(
        lambda: validate(SendOptions(), settings, max_priority=0, max_retain_seconds=None)
    )
    assert check == "deadline_seconds"


def test_the_prompts_of_all_choices_may_reach_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "MAX_CHOICES_CHARACTERS", 10)
    assert field_of(lambda: check_choices(10, 2)) is None
    assert field_of(lambda: check_choices(11, 2)) == "n"
    assert field_of(lambda: check_choices(11, 1)) == "messages"
    assert field_of(lambda: check_logprobs(10, 10)) is None
    assert field_of(lambda: check_logprobs(11, 10)) == "parameters.logprobs"


def test_what_a_request_repeats_is_known_before_it_is_rendered() -> None:
    query = {"role": "query", "content": "ab"}
    prompts = [Prompt(messages=[query, {"role": "document", "content": one}]) for one in "cd"]
    assert characters_of(GroupRequest("m", prompts)) == (6, 2)
    assert characters_of(GroupRequest("m", prompts[:1], n=3)) == (9, 6)
    assert characters_of(GroupRequest("m", [Prompt(content="abc")], n=3)) == (0, 0)


class Format:
    """A model of 100 tokens; a prompt has as many as the test demands."""

    max_model_len = 100
    has_chat = True
    task = None
    default_parameters: Mapping[str, float] | None = None

    def __init__(self, tokens: int | None) -> None:
        self.tokens = tokens
        self.counted = list[str]()

    async def count_tokens(self, text: str) -> int | None:
        self.counted.append(text)
        return self.tokens


def draft(
    form: Format | None, text: str, *, prompt: str | None = None, **parameters: Any
) -> SubmissionDraft:
    model = Model("m", 1, True, "", form)  # type: ignore[arg-type]
    options = SendOptions(parameters=SamplingParameters(**parameters))
    return SubmissionDraft(UUID(int=1), model, UUID(int=2), text, prompt, options)


@pytest.mark.parametrize(
    ("tokens", "length", "given", "expected"),
    [
        (None, 900, 7, 7),  # the prompt's tokens are not known
        (None, 900, None, 50),
        (60, 42, None, 50),  # 42 bytes, 8 special tokens and 50 new ones fit: nothing is counted
        (60, 43, None, 40),
        (99, 900, None, 1),
        (20, 900, None, 50),
        (60, 900, 40, 40),
        (60, 900, 41, "parameters.max_tokens"),
        (100, 900, None, "content"),
        (101, 900, 1, "content"),
    ],
)
async def test_a_text_and_its_continuation_fit_the_model(
    tokens: int | None, length: int, given: int | None, expected: int | str
) -> None:
    parameters: dict[str, Any] = {} if given is None else {"max_tokens": given}
    form = Format(tokens)
    found: int | str | None
    try:
        found = await generated_tokens(draft(form, "x" * length, **parameters), 50)
    except InvalidRequestError as error:
        found = error.errors[0].field
    assert found == expected
    assert bool(form.counted) is (length != 42)


async def test_a_default_above_the_models_length_is_cut() -> None:
    assert await generated_tokens(draft(Format(None), "x" * 900), 101) == 100
    assert await generated_tokens(draft(None, "x" * 900), 101) == 101


async def test_the_fewest_tokens_may_be_the_most() -> None:
    assert await generated_tokens(draft(None, "x", max_tokens=5, min_tokens=5), 9) == 5
    assert await generated_tokens(draft(None, "x", min_tokens=9), 9) == 9
    with pytest.raises(InvalidRequestError) as caught:
        await generated_tokens(draft(None, "x", min_tokens=10), 9)
    assert caught.value.errors[0].field == "parameters.min_tokens"


async def test_a_rendered_prompt_is_counted_in_place_of_the_text() -> None:
    form = Format(60)
    await generated_tokens(draft(form, "x" * 900, prompt="y" * 900), 50)
    assert form.counted == ["y" * 900]
    assert draft(None, "x", prompt="").text == ""
    assert draft(None, "x").text == "x"


async def test_tokens_are_estimated_where_no_tokenizer_counts_them() -> None:
    for form, text, tokens in (
        (None, "x" * 8, 2),
        (None, "x" * 9, 3),
        (Format(None), "é" * 4, 2),
        (Format(0), "x", 0),
    ):
        assert await count_tokens(draft(form, text).model, text) == tokens
