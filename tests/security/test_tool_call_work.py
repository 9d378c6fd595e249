"""Model outputs made to keep a parser of tool calls busy: its work grows linearly with the text."""

from collections.abc import Callable

import pytest

from app.inference.tool_calls import Reader, ToolFormat, read_all, reader_of, reader_of_forced
from tests.security.growth import assert_linear

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
QWEN, GLM = ToolFormat.QWEN_XML, ToolFormat.GLM
DEEPSEEK, PYTHONIC = ToolFormat.DEEPSEEK_V31, ToolFormat.PYTHONIC
_DELTA = 4  # characters, about those of a token


def _tag(words: str) -> str:
    """A token of DeepSeek's tool calls."""
    return "<\uff5ctool\u2581" + words.replace(" ", "\u2581") + "\uff5c>"


# Each with the format that reads it: a text of about `n` characters.
ATTACKS: dict[str, tuple[ToolFormat | None, Callable[[int], str]]] = {
    "capitals behind a bracket": (MISTRAL, lambda n: "[TOOL_CALLS]f[" + "A" * n + "!"),
    "letters of a call's id": (MISTRAL, lambda n: "[TOOL_CALLS]f[CALL_ID]" + "a" * n + "!"),
    "space behind a name": (MISTRAL, lambda n: "[TOOL_CALLS]f" + " " * n + "!"),
    "names that never begin": (MISTRAL, lambda n: "[TOOL_CALLS]f[CALL_ID]a" * (n // 23) + "!"),
    "openings of openings": (MISTRAL, lambda n: "[TOOL_CALLS]" * (n // 12) + "!"),
    "brackets behind openings": (MISTRAL, lambda n: "[TOOL_CALLS][ " * (n // 14) + "!"),
    "nested false calls (Mistral)": (
        MISTRAL,
        lambda n: "[TOOL_CALLS]{" * (n // 14) + "}" * (n // 14) + "!",
    ),
    "nested false calls (Hermes)": (
        HERMES,
        lambda n: "<tool_call>{" * (n // 13) + "}" * (n // 13) + "!",
    ),
    "false calls in strings": (HERMES, lambda n: '<tool_call>{"' * (n // 13) + '"}' * (n // 13)),
    "space behind false calls": (HERMES, lambda n: "<tool_call>{}" + " " * n + "!"),
    "an opening without an end": (HERMES, lambda n: "<tool_call>{" * (n // 12)),
    "many false calls": (HERMES, lambda n: "<tool_call>{}!" * (n // 14)),
    "many calls": (HERMES, lambda n: '<tool_call>{"name":"f"}</tool_call>' * (n // 35)),
    "escapes": (LLAMA, lambda n: '{"name": "f", "x": "' + "\\\\" * (n // 2) + '"}'),
    "nothing but space": (HERMES, lambda n: " " * n),
    "separators": (LLAMA, lambda n: ";" * n + "!"),
    "digits": (LLAMA, lambda n: '{"name":"f","arguments":{"x":' + "1" * n + "}}"),
    "nesting": (LLAMA, lambda n: '{"name":"f","arguments":' + '{"a":' * (n // 6) + "}" * (n // 6)),
    "parameters": (
        QWEN,
        lambda n: "<function=f>" + "<parameter=a>1</parameter>" * (n // 26) + "</function>",
    ),
    "openings of parameters": (QWEN, lambda n: "<function=f>" + "<parameter=a>" * (n // 13)),
    "functions of functions": (QWEN, lambda n: "<function=" * (n // 10)),
    "false functions": (QWEN, lambda n: "<function=f>x</function>" * (n // 24)),
    "calls without functions": (QWEN, lambda n: "<tool_call>" * (n // 11)),
    "ends of functions": (QWEN, lambda n: "<function=f></function>" + "</tool_call>" * (n // 12)),
    "keys and values": (
        GLM,
        lambda n: (
            "<tool_call>f"
            + "<arg_key>a</arg_key><arg_value>1</arg_value>" * (n // 44)
            + "</tool_call>"
        ),
    ),
    "keys without values": (GLM, lambda n: "<tool_call>f" + "<arg_key>" * (n // 9)),
    "ends of calls (DeepSeek)": (
        DEEPSEEK,
        lambda n: (_tag("calls begin") + _tag("call begin")) * (n // 38),
    ),
    "calls (DeepSeek)": (
        DEEPSEEK,
        lambda n: (
            _tag("calls begin")
            + (_tag("call begin") + "f<\uff5ctool\u2581sep\uff5c>{}" + _tag("call end")) * (n // 46)
        ),
    ),
    "false calls (DeepSeek)": (
        DEEPSEEK,
        lambda n: (_tag("calls begin") + _tag("call begin") + "f" + _tag("call end")) * (n // 55),
    ),
    "a list without an end": (PYTHONIC, lambda n: "[f(a=" + "[" * n),
    "strings": (PYTHONIC, lambda n: "[f(a=" + "'\\''," * (n // 5) + ")]"),
    "a string without an end": (PYTHONIC, lambda n: "[f(a='" + "\\'" * (n // 2)),
    "calls (Python)": (PYTHONIC, lambda n: "[" + "f(a=1)," * (n // 7) + "]"),
    "digits (Python)": (PYTHONIC, lambda n: "[f(a=" + "1" * n + ")]"),
    "brackets of a forced list": (None, lambda n: "[" * n + "!"),
}


def read_in_deltas(reader: Reader, text: str) -> None:
    for at in range(0, len(text), _DELTA):
        reader.feed(text[at : at + _DELTA])
    reader.finish()


@pytest.mark.parametrize("read", [read_all, read_in_deltas])
@pytest.mark.parametrize("attack", ATTACKS)
def test_the_work_grows_linearly(attack: str, read: Callable[[Reader, str], object]) -> None:
    tool_format, make = ATTACKS[attack]

    def work(size: int) -> None:
        reader = reader_of(tool_format) if tool_format else reader_of_forced()
        read(reader, make(size))

    assert_linear(work)


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_long_delta_is_read_in_linear_time(attack: str) -> None:
    """A reader that catches up feeds all of a text at once."""
    tool_format, make = ATTACKS[attack]

    def work(size: int) -> None:
        (reader_of(tool_format) if tool_format else reader_of_forced()).feed(make(size))

    assert_linear(work)
