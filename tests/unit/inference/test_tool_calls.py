"""Tool calls in a model's text: found in each format, for all cuts of the text; other text stays."""

import json
from collections.abc import Callable
from functools import partial
from itertools import cycle
from uuid import UUID

import pytest
from hypothesis import example, given, strategies as st

from app.inference.tool_calls import (
    NamedReader,
    Reader,
    ToolCall,
    ToolFormat,
    call_id,
    detect_format,
    read_all,
    reader_of,
    reader_of_forced,
)

HERMES, LLAMA, MISTRAL = ToolFormat.HERMES, ToolFormat.LLAMA3_JSON, ToolFormat.MISTRAL
ADD = ToolCall("add", '{"a": 1}')
NOW = ToolCall("now", "{}")


def read_in_pieces(reader: Reader, text: str, sizes: list[int]) -> tuple[str, list[ToolCall]]:
    """The text and the calls of a text that is cut into pieces of these sizes, again and again."""
    pieces, at = [], 0
    for size in cycle(sizes):
        if at >= len(text):
            break
        pieces += reader.feed(text[at : at + size])
        at += size
    pieces += reader.finish()
    assert "" not in pieces
    words = "".join(piece for piece in pieces if isinstance(piece, str))
    return words, [piece for piece in pieces if isinstance(piece, ToolCall)]


@pytest.mark.parametrize(
    ("tool_format", "text", "words", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', "", [ADD]),
        (HERMES, 'So:\n<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>', "So:", [ADD]),
        (
            HERMES,
            '<tool_call>{"name":"add","arguments":{"a":1}}</tool_call>\n'
            '<tool_call>{"name":"now"}</tool_call> Done. ',
            "Done.",
            [ADD, NOW],
        ),
        (HERMES, 'So:\n<tool_call>{"name":"now"}</tool_call>\nDone', "So:Done", [NOW]),
        # The end token may come before the closing tag, or cut it.
        (HERMES, '<tool_call>{"name":"add","arguments":{"a":1}}', "", [ADD]),
        (HERMES, '<tool_call>{"name":"add","arguments":{"a":1}} </tool', "", [ADD]),
        (HERMES, '<tool_call>{"name":"add","arguments":"{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        (LLAMA, '<|python_tag|>{"name":"add","parameters":{"a":1}}; {"name":"now"}', "", [ADD, NOW]),
        (LLAMA, '{"name":"add","parameters":{"a":1}} and so on', "and so on", [ADD]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', "", [ADD]),
        (MISTRAL, 'Hm[TOOL_CALLS][{"name":"add","arguments":{"a":1}}, {"name":"now"}]', "Hm", [ADD, NOW]),
        (MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now{}', "", [ADD, NOW]),
        (MISTRAL, '[TOOL_CALLS]add[CALL_ID]a1B2[ARGS]{"a": 1}', "", [ADD]),
        (MISTRAL, "[TOOL_CALLS]now{} or [", "or [", [NOW]),
        # Strings may hold braces and quotation marks.
        (LLAMA, '{"name": "f", "parameters": {"x": "}\\""}}!', "!", [ToolCall("f", '{"x": "}\\""}')]),
        # Separators behind the last call are dropped.
        (LLAMA, '{"name": "now"}; ', "", [NOW]),
        (LLAMA, '{"name": "now"}; {"name":', '{"name":', [NOW]),
        (MISTRAL, '[TOOL_CALLS][{"name": "now"}] Done', "Done", [NOW]),
        (MISTRAL, "[TOOL_CALLS]now{}[TOOL_CALLS]", "", [NOW]),
        (MISTRAL, "[TOOL_CALLS]now{}[TOOL_CALLS]Done!", "[TOOL_CALLS]Done!", [NOW]),
        (MISTRAL, "[TOOL_CALLS]now{}[TOOL_CALLS]Done", "[TOOL_CALLS]Done", [NOW]),
    ],
)  # fmt: skip
def test_calls_are_found(
    tool_format: ToolFormat, text: str, words: str, calls: list[ToolCall]
) -> None:
    assert read_all(reader_of(tool_format), text) == (words, calls)
    assert read_in_pieces(reader_of(tool_format), text, [1]) == (words, calls)


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (HERMES, "plain"),
        (HERMES, "<tool_call>"),
        (HERMES, "<tool_call>{}</tool_call>"),
        (HERMES, '<tool_call>{"name": 1}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"x": '),
        (HERMES, '<tool_call>{"name": "f"}</tool_call'.replace("_call<", "<") + "x"),
        (HERMES, "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>"),
        (HERMES, '<tool_call>{"name": "\\ud800"}</tool_call>'),
        (HERMES, '<tool_call>{"x": <tool_call>{"name": "f"}</tool_call>'),
        (HERMES, "a < b <tool"),
        (HERMES, "  \n"),
        (LLAMA, '{"answer": 42}'),
        (LLAMA, 'Call {"name": "f"}'),
        (LLAMA, '{"name": "f", "parameters": '),
        (LLAMA, "<|python_tag|>print(1)"),
        (MISTRAL, "[TOOL_CALLS]"),
        (MISTRAL, "[TOOL_CALLS] nothing of the kind"),
        (MISTRAL, "[TOOL_CALLS][1, 2]"),
        (MISTRAL, "[TOOL_"),
    ],
)
def test_what_is_no_call_stays_text(tool_format: ToolFormat, text: str) -> None:
    assert read_all(reader_of(tool_format), text) == (text, [])
    assert read_in_pieces(reader_of(tool_format), text, [1]) == (text, [])


def test_a_call_behind_a_broken_one_is_found() -> None:
    text = '<tool_call>{"name": 1}</tool_call><tool_call>{"name":"now"}</tool_call>'
    assert read_all(reader_of(HERMES), text) == ('<tool_call>{"name": 1}</tool_call>', [NOW])


def test_what_is_forced_by_a_schema() -> None:
    forced = '[{"name": "add", "parameters": {"a": 1}}, {"name": "now", "parameters": {}}]'
    assert read_all(reader_of_forced(), forced) == ("", [ADD, NOW])
    assert read_all(NamedReader("add"), '{"a": 1}') == ("", [ADD])


def test_separators_before_a_call_are_bounded() -> None:
    call = '{"name": "now"}'
    assert read_all(reader_of(LLAMA), " " * 256 + call) == ("", [NOW])
    assert read_all(reader_of(LLAMA), " " * 257 + call) == (" " * 257 + call, [])


def test_text_that_begins_no_call_is_not_held_back() -> None:
    reader = reader_of(HERMES)
    assert reader.feed("plain") == ["plain"]
    assert reader.feed("text<tool_") == ["text"]
    assert reader.feed("box>") == ["<tool_box>"]


def test_letters_of_arguments_stay_as_they_are() -> None:
    _, (call,) = read_all(reader_of(LLAMA), '{"name": "f", "parameters": {"x": "\\u00e9🙂"}}')
    assert call.arguments == '{"x": "é🙂"}'


def test_half_a_surrogate_pair_stays_escaped() -> None:
    _, (call,) = read_all(reader_of(LLAMA), '{"name": "f", "parameters": {"x": "\\ud83d"}}')
    assert call.arguments == '{"x": "\\ud83d"}'


MAKERS: list[Callable[[], Reader]] = [
    *(partial(reader_of, one) for one in ToolFormat),
    reader_of_forced,
]
FRAGMENTS = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", ";",
        "[", "]", ",", " ", "\n", "{", "}", '"', "\\", "f", "add", '{"name": "f"}', "🙂",
        '{"name": "f", "arguments": {"x": "}\\""}}', '{"name": "f", "parameters": {}}',
        '<tool_call>{"name": "f"}</tool_call>', '[TOOL_CALLS][{"name": "f"}', "[TOOL_CALLS]f{}",
        "<function=", "f>", "<parameter=", "a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>",
        "<arg_value>", "</arg_value>", "<seed:tool_call>", "</seed:tool_call>", "[f(", "a=", ")", "'",
        "<\uff5ctool\u2581calls\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581begin\uff5c>",
        "<\uff5ctool\u2581sep\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>", "```json", "```",
        "<|python_start|>", "<|python_end|>",
    ]
)  # fmt: skip


@given(
    st.lists(FRAGMENTS, max_size=12).map("".join) | st.text(max_size=40),
    st.lists(st.integers(1, 7), min_size=1, max_size=40),
    st.sampled_from(MAKERS),
)
@example('[TOOL_CALLS]f{"x": 1}f', [1], lambda: reader_of(MISTRAL))
@example('{"name": "f"};;', [1], lambda: reader_of(LLAMA))
def test_the_cuts_change_nothing(text: str, sizes: list[int], make: Callable[[], Reader]) -> None:
    """The calls and the text do not depend on the cuts; a text that holds no call is returned whole."""
    words, calls = read_in_pieces(make(), text, sizes)
    assert (words, calls) == read_all(make(), text)
    if not calls:
        assert words == text
    for call in calls:
        assert isinstance(json.loads(call.arguments), dict)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ '<tool_call>\\n' }}{{ tool_call | tojson }}", HERMES),
        ("{{ '[TOOL_CALLS] [' }}", MISTRAL),
        ("<|start_header_id|>{{ role }}", LLAMA),
        ("{{ '<|python_tag|>' }}", LLAMA),
        ("{{ messages[0].content }}", None),
    ],
)
def test_the_format_is_detected_by_the_templates_markers(
    template: str, found: ToolFormat | None
) -> None:
    assert detect_format(template) is found


def test_ids_are_the_same_at_each_reading() -> None:
    result = UUID("01890000-0000-7000-8000-000000000000")
    assert call_id(HERMES, result, 0) == f"call_{result.hex}0"
    short = [call_id(MISTRAL, result, place) for place in range(3)]
    assert len(set(short)) == 3
    assert all(len(one) == 9 and one.isalnum() for one in short)
