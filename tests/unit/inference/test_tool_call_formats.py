"""Tool calls in the notations with types of their own, or several tokens around a call."""

from typing import Any

import pytest

from app.inference.tool_calls import ToolCall, ToolFormat, detect_format, read_all, reader_of
from app.inference.tool_calls.values import typed_value
from tests.unit.inference.test_tool_calls import read_in_pieces

QWEN, SEED, GLM = ToolFormat.QWEN_XML, ToolFormat.SEED_XML, ToolFormat.GLM
V3, V31, PYTHONIC = ToolFormat.DEEPSEEK_V3, ToolFormat.DEEPSEEK_V31, ToolFormat.PYTHONIC
ADD, NOW = ToolCall("add", '{"a": 1}'), ToolCall("now", "{}")
SCHEMAS: dict[str, Any] = {
    "add": {
        "properties": {
            "a": {"type": "integer"},
            "s": {"type": "string"},
            "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "b": {"type": "boolean"},
            "o": {"type": ["object", "array"]},
            "any": {},
        }
    }
}
BAR, GAP = "\uff5c", "\u2581"


def deep(text: str) -> str:
    """DeepSeek's tokens: `<CALLS>`, `<CALL>`, `<SEP>`, `</CALL>`, `</CALLS>`."""
    for short, words in (
        ("<CALLS>", "tool calls begin"),
        ("</CALLS>", "tool calls end"),
        ("<CALL>", "tool call begin"),
        ("</CALL>", "tool call end"),
        ("<SEP>", "tool sep"),
    ):
        text = text.replace(short, f"<{BAR}{words.replace(' ', GAP)}{BAR}>")
    return text


FENCED = '<CALL>function<SEP>add\n```json\n{"a": 1}\n```</CALL>'
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
KEYS = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"

FOUND: list[tuple[ToolFormat, str, str, list[ToolCall]]] = [
    (QWEN, XML, "", [ADD]),
    (QWEN, f"So:\n{XML}\n{XML}\nDone", "So:Done", [ADD, ADD]),
    (QWEN, "<function=add><parameter=a>1</parameter></function></tool_call>", "", [ADD]),
    (QWEN, "<tool_call><function=now></function></tool_call>", "", [NOW]),
    (QWEN, "<tool_call><function=now></tool_call>", "", [NOW]),
    (QWEN, "<tool_call><function=now>", "", [NOW]),  # the output was cut
    (QWEN, "<tool_call><function=add><parameter=a>1</parameter>", "", [ADD]),
    (QWEN, "<tool_call><function=add><parameter=a>1</function>", "", [ADD]),
    (
        QWEN,
        "<tool_call><function=add><parameter=s>\n\n<b> 1 </b>\n\n</parameter></function></tool_call>",
        "",
        [ToolCall("add", '{"s": "\\n<b> 1 </b>\\n"}')],
    ),
    (SEED, XML.replace("tool_call>", "seed:tool_call>"), "", [ADD]),
    (GLM, KEYS, "", [ADD]),
    (GLM, f"So:{KEYS}{KEYS} Done", "So:Done", [ADD, ADD]),
    (GLM, "<tool_call>now</tool_call>", "", [NOW]),
    (GLM, "<tool_call>now\n</tool_call>", "", [NOW]),
    (GLM, "<tool_call>add<arg_key> a </arg_key><arg_value>1</arg_value></tool_call>", "", [ADD]),
    (
        GLM,
        "<tool_call>add<arg_key>s</arg_key><arg_value> 1 </arg_value>",
        "",
        [ToolCall("add", '{"s": " 1 "}')],
    ),
    (V31, deep('<CALLS><CALL>add<SEP>{"a": 1}</CALL></CALLS>'), "", [ADD]),
    (
        V31,
        deep('So <CALLS><CALL>add<SEP>{"a": 1}</CALL><CALL>now<SEP>{}</CALL></CALLS> Done'),
        "So Done".replace(" D", "D"),
        [ADD, NOW],
    ),
    (V31, deep("<CALLS><CALL>now<SEP>{}"), "", [NOW]),
    (V31, deep("<CALLS><CALL>now<SEP>{}</CALLS>"), "", [NOW]),
    (V3, deep(f"<CALLS>{FENCED}\n{FENCED}</CALLS>"), "", [ADD, ADD]),
    (V3, deep("<CALLS><CALL>function<SEP>now\n```json\n{}\n```"), "", [NOW]),
    (PYTHONIC, "[add(a=1)]", "", [ADD]),
    (PYTHONIC, "[add(a=1), now()]", "", [ADD, NOW]),
    (PYTHONIC, "<|python_start|>[ now( ) , ]<|python_end|>", "", [NOW]),
    (PYTHONIC, "[now()] Done", "Done", [NOW]),
    (
        PYTHONIC,
        """[f(a='it\\'s "]"', b=[1, -2.5, None], c={"x": True, 'y': (1,)}, d="\\n\\u00e9\\d")]""",
        "",
        [
            ToolCall(
                "f",
                '{"a": "it\'s \\"]\\"", "b": [1, -2.5, null], "c": {"x": true, "y": [1]}, '
                '"d": "\\né\\\\d"}',
            )
        ],
    ),
]

TEXT: list[tuple[ToolFormat, str]] = [
    (QWEN, "<tool_call>"),
    (QWEN, "<tool_call>plain</tool_call>"),
    (QWEN, "<tool_call><function=></function></tool_call>"),
    (QWEN, "<tool_call><function=f>x</function></tool_call>"),
    (QWEN, "<tool_call><function=add><parameter=a>1"),
    (QWEN, "<tool_call><function=add><parameter>1</parameter></function>"),
    (GLM, "<tool_call></tool_call>"),
    (GLM, "<tool_call>two words</tool_call>"),
    (GLM, "<tool_call>add<arg_key>a</arg_key></tool_call>"),
    (GLM, "<tool_call>add<arg_key>a</arg_key><arg_value>1</tool_call>"),
    (GLM, "<tool_call>"),
    (V31, deep("<CALLS>")),
    (V31, deep("<CALLS></CALLS>")),
    (V31, deep("<CALLS><CALL>now<SEP>{</CALL></CALLS>")),
    (V31, deep("<CALLS><CALL>now {}</CALL></CALLS>")),
    (V3, deep("<CALLS><CALL>function<SEP>now\n{}</CALL></CALLS>")),
    (PYTHONIC, "[1, 2]"),
    (PYTHONIC, "[I don't know]"),
    (PYTHONIC, "[f(1)]"),
    (PYTHONIC, "[f(a=b)]"),
    (PYTHONIC, "[f(a=1) g()]"),
    (PYTHONIC, "[f(a=1)"),
    (PYTHONIC, "[f(a=1e999)]"),
    (PYTHONIC, "[f(a={1: 2})]"),
    (PYTHONIC, "[f(a=" + "[" * 40 + "]" * 40 + ")]"),
    (PYTHONIC, "f(a=1)"),
    (PYTHONIC, "["),
    (ToolFormat.HARMONY, "plain [text]"),
]


@pytest.mark.parametrize(("form", "text", "words", "calls"), FOUND)
def test_calls_are_found_for_all_cuts(
    form: ToolFormat, text: str, words: str, calls: list[ToolCall]
) -> None:
    assert read_all(reader_of(form, SCHEMAS), text) == (words, calls)
    for size in (1, 2, 3, 7, 11):
        assert read_in_pieces(reader_of(form, SCHEMAS), text, [size]) == (words, calls)


@pytest.mark.parametrize(("form", "text"), TEXT)
def test_what_is_no_call_stays_text(form: ToolFormat, text: str) -> None:
    assert read_all(reader_of(form, SCHEMAS), text) == (text, [])
    assert read_in_pieces(reader_of(form, SCHEMAS), text, [1]) == (text, [])


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("a", " 12\n", 12),
        ("a", "-1", -1),
        ("a", "1.5", 1.5),
        ("a", "9" * 5000, "9" * 5000),
        ("s", "12", "12"),
        ("s", "null", "null"),
        ("x", "1.5", 1.5),
        ("x", "2.0", 2),
        ("x", "1e999", "1e999"),
        ("x", "1e9999", "1e9999"),
        ("x", "NULL", None),
        ("b", "True", True),
        ("b", "false ", False),
        ("b", "yes", "yes"),
        ("o", '{"a": [1]}', {"a": [1]}),
        ("o", "{", "{"),
        ("o", "[1e999]", "[1e999]"),
        ("o", "[" * 100_000, "[" * 100_000),
        ("any", "12", 12),
        ("any", "words", "words"),
        ("unknown", "12", "12"),
    ],
)
def test_a_value_has_the_type_of_its_schema(name: str, text: str, value: Any) -> None:
    found = typed_value(text, SCHEMAS["add"], name)
    assert (type(found), found) == (type(value), value)


def test_an_odd_schema_gives_texts() -> None:
    odd: list[dict[str, Any]] = [{}, {"properties": []}, {"properties": {"a": True}}]
    for schema in odd:
        assert typed_value("1", schema, "a") == "1"
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(20):
        nested = {"anyOf": [nested, {"type": "string"}]}
    assert typed_value("1", {"properties": {"a": nested}}, "a") == "1"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("<tool_call>\n<function=' + name", QWEN),
        ("<seed:tool_call><function=", SEED),
        ("<tool_call>{{ name }}<arg_key>", GLM),
        (deep("<CALLS><CALL>{{ name }}<SEP>"), V31),
        (deep("<CALLS><CALL>function<SEP>{{ name }}\n```json"), V3),
        ("[func_name1(params_name1=params_value1)]<|start_header_id|>", PYTHONIC),
        ("<|header_start|>", ToolFormat.LLAMA3_JSON),
        ("<|start|>assistant<|channel|>analysis<|message|>", ToolFormat.HARMONY),
    ],
)
def test_the_format_is_detected(template: str, found: ToolFormat) -> None:
    assert detect_format(template) is found
