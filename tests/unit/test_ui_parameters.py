"""Parameters as entries of a form, and back."""

import pytest

from app.ui.parameters import FormError, Parameter, parse_parameters, to_form

STOP = Parameter("stop", "lines", "Stopping", "", "")
CHOICE = Parameter("structured_outputs", "structure", "Structure", "", "")
NUMBER = Parameter("temperature", "number", "Randomness", "", "")


@pytest.mark.parametrize(
    "texts", [["END", "two words "], ["\n\n", "x"], ["[INST]"], ['["a"]'], ["a\nb"], [" "]]
)
def test_texts_come_back_as_they_were(texts: list[str]) -> None:
    assert parse_parameters([STOP], to_form({"stop": texts})) == {"stop": texts}
    choice = {"structured_outputs": {"choice": texts}}
    assert parse_parameters([CHOICE], to_form(choice)) == choice


def test_a_number_beyond_all_numbers_is_told() -> None:
    with pytest.raises(FormError) as refused:
        parse_parameters([NUMBER], {"p.temperature": "1e999"})
    assert refused.value.fields == [("temperature", "is too large")]
