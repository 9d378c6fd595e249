"""Lines of JSON that no reader divides."""

import json

import orjson
import pytest

from app.core.json_lines import on_one_line

ENDS = "\x85\u2028\u2029"


@pytest.mark.parametrize(
    "value",
    [
        f"a{ENDS}b",
        {f"k{ENDS}": [f"\\{ENDS}", "\\u2028"]},
        "Ă\u2008 ɨ é\xa8 “quoted”… 漢字 🙂",  # with bytes of line ends that are none
        "\x1c\x1d\x1e\x0b\x0c\r\n",
        "plain",
    ],
)
def test_a_line_is_one_for_each_reader_and_the_same_value(value: object) -> None:
    line = on_one_line(orjson.dumps(value))
    assert len(line.decode().splitlines()) == 1
    assert json.loads(line) == value


def test_what_has_no_line_end_stays_the_same_object() -> None:
    for text in (b'"plain"', '"Ă漢字🙂“”…é"'.encode()):
        assert on_one_line(text) is text
