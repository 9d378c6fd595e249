"""Parameters as entries of a form, and back."""

from typing import Any

import pytest

from app.ui.errors import FormError
from app.ui.parameters import Parameter, as_entered, model_of, parse_parameters, to_form

PARAMETERS = [
    Parameter("max_tokens", "integer", "Length", "", "", 1, 1_000_000, default=512),
    Parameter("temperature", "number", "Randomness", "", "", 0, 100),
    Parameter("top_p", "number", "Randomness", "", "", 0, 1, is_above=True),
]
MODELS: list[dict[str, Any]] = [
    {"name": "demo", "max_model_len": 1024},
    {"name": "other", "max_model_len": None},
]
STOP = Parameter("stop", "lines", "Stopping", "", "")
CHOICE = Parameter("structured_outputs", "structure", "Structure", "", "")
NUMBER = Parameter("temperature", "number", "Randomness", "", "")


@pytest.mark.parametrize(
    ("model", "stored", "prompt_tokens", "is_shown"),
    [
        ("demo", 512, 10, False),  # the default
        ("demo", 159, 865, False),  # the default, and the model's length left no more
        ("demo", 159, 864, True),
        ("demo", 600, 424, True),  # more than the default: the user entered it
        ("demo", 100, None, True),  # the prompt is unknown
        ("other", 100, 10, True),
        ("gone", 100, 10, True),
    ],
)
def test_a_default_is_not_entered_again(
    model: str, stored: int, prompt_tokens: int | None, is_shown: bool
) -> None:
    result: dict[str, Any] = {
        "model_name": model,
        "parameters": {"max_tokens": stored, "temperature": 0.5},
        "usage": None if prompt_tokens is None else {"prompt_tokens": prompt_tokens},
    }
    entered = as_entered(result, PARAMETERS, MODELS)
    assert entered == ({"max_tokens": stored} if is_shown else {}) | {"temperature": 0.5}
    assert "max_tokens" in result["parameters"]  # the result itself stays as it is


def test_an_adapter_is_entered_with_the_models_name() -> None:
    result: dict[str, Any] = {
        "model_name": "demo",
        "parameters": {"max_tokens": 100, "lora_name": "sheep"},
        "usage": None,
    }
    assert model_of(result) == "demo:sheep"
    assert as_entered(result, PARAMETERS, MODELS) == {"max_tokens": 100}
    assert model_of({"model_name": "demo", "parameters": {}}) == "demo"


def test_numbers_are_shown_as_they_are_entered() -> None:
    form = to_form({"temperature": 0.0, "top_p": 0.25, "max_tokens": 7})
    assert form == {"p.temperature": "0", "p.top_p": "0.25", "p.max_tokens": "7"}


def test_bounds_are_sentences() -> None:
    assert [one.bounds for one in PARAMETERS] == [
        "From 1 to 1,000,000.", "From 0 to 100.", "Above 0, at most 1."
    ]  # fmt: skip


@pytest.mark.parametrize(
    "texts", [["END", "two words "], ["\n\n", "x"], ["[INST]"], ['["a"]'], ["a\nb"], [" "]]
)
def test_texts_come_back_as_they_were(texts: list[str]) -> None:
    assert parse_parameters([STOP], to_form({"stop": texts})) == {"stop": texts}
    choice = {"structured_outputs": {"choice": texts}}
    assert parse_parameters([CHOICE], to_form(choice)) == choice


def test_a_number_beyond_all_numbers_is_reported() -> None:
    with pytest.raises(FormError) as refused:
        parse_parameters([NUMBER], {"p.temperature": "1e999"})
    assert refused.value.fields == (("temperature", "is too large"),)
