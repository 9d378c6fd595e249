"""Reasoning and tool calls are split as by vLLM's own parsers, for all cuts of the text.

vLLM's parser of Harmony needs a vocabulary from the network, so that no case of it is here.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

from app.inference.reasoning import OutputReader, Piece, Reasoning, ReasoningFormat, ReasoningUse
from app.inference.tool_calls import ToolCall, ToolFormat, reader_of
from tests.judges import judge
from tests.unit.inference.test_tool_call_formats import deep

pytestmark = [
    pytest.mark.slow("its judge runs where the lock has changed"),
    pytest.mark.soak,
    pytest.mark.timeout(300),
]

THINK, SEED, MISTRAL = ReasoningFormat.THINK, ReasoningFormat.SEED, ReasoningFormat.MISTRAL
OLD_MISTRAL = ["[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"]  # its tokenizer lacks them
PARAMETERS = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    "b": {"type": "boolean"},
    "o": {"type": "object"},
    "l": {"type": "array"},
}
SCHEMA: dict[str, Any] = {"type": "object", "properties": PARAMETERS}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "add", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


@dataclass(frozen=True)
class Case:
    """A text, vLLM's name of its parser, and ours."""

    kind: str
    parser: str
    text: str
    tools: list[dict[str, Any]] = field(default_factory=list)
    without: list[str] = field(default_factory=list)


def reasoned(parser: str, *texts: str) -> list[Case]:
    return [Case(kind, parser, text) for text in texts for kind in ("reasoning", "stream")]


def called(parser: str, *texts: str, without: list[str] | None = None) -> list[Case]:
    return [Case("tools", parser, text, TOOLS, without or []) for text in texts]


CODE = "def f(x):\n    return '<b>' if x < 1 else \"é\"\n"
XML = "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\n 2 \n\n</parameter>\n</function>\n</tool_call>"
VALUES = (
    "<tool_call><function=add><parameter=x>1.5</parameter><parameter=b>true</parameter>"
    '<parameter=o>{"k": [1, "é"]}</parameter><parameter=l>[]</parameter></function></tool_call>'
)
ODD = (
    "<tool_call><function=add><parameter=x>null</parameter><parameter=b>no</parameter>"
    "<parameter=a>1.5</parameter><parameter=unknown>3</parameter></function></tool_call>"
)
LONG = (
    f"<tool_call>\n<function=add>\n<parameter=s>\n{CODE}\n</parameter>\n</function>\n</tool_call>"
)
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "s": "} \\" {"}}\n</tool_call>'
GLM = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>s</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
FENCED = '<CALL>function<SEP>add\n```json\n{"a": 1}\n```</CALL>'

CASES = [
    *reasoned(
        "qwen3",
        "Why?\n</think>\n\nSo.",
        "<think>\nWhy?\n</think>\n\nSo.",
        f"<think>\n{CODE}</think>\n{CODE}",
        "</think>So.",
        "I call. <tool_call> x",
        "never closed </thin",
    ),
    *reasoned(
        "deepseek_r1",
        "Why?\n</think>\n\nSo.",
        "<think>\nWhy?</think>So. 1 < 2",
        "never closed",
        "</think>",
    ),
    *reasoned("minimax_m2", "a</think>b"),
    *reasoned("glm45", "<think>Why?</think>\nSo.", "Why?</think>\nSo."),
    *reasoned("kimi_k2", "<think>a</think>b"),
    *reasoned("seed_oss", "<seed:think>a</seed:think>b", "a\n</seed:think>b"),
    *reasoned(
        "mistral",
        "[THINK]a[/THINK]b",
        "[THINK]a[/THINK]b[THINK]c[/THINK]d",
        "plain [text]",
        "[THINK]never closed",
    ),
    *called("hermes", HERMES, f"So:\n{HERMES}\n{HERMES}", "plain <tool_call> text", "1 < 2"),
    *called(
        "llama3_json",
        '{"name": "add", "parameters": {"a": 1}}',
        '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
        '{"answer": 1}',
        "plain",
    ),
    *called(
        "llama4_pythonic",
        '[add(a=1, s="it\'s"), now()]',
        "<|python_start|>[now()]<|python_end|>",
        "[add(x=-1.5, b=True, o={'k': [None, 'é']}, l=[])]",
        "[1, 2]",
        "plain",
    ),
    *called("pythonic", "[add(a=1, x=None)]", "[add(s='a\\nb')]"),
    *called(
        "mistral",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}',
        'So[TOOL_CALLS]add{"a": 1}',
        "plain",
    ),
    *called(
        "mistral",
        '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}}]',
        'So[TOOL_CALLS][{"name": "add", "arguments": {"s": "[}]"}}]',
        without=OLD_MISTRAL,
    ),
    *called(
        "qwen3_coder",
        XML,
        f"So:\n{XML}\n{XML}",
        VALUES,
        ODD,
        LONG,
        "<function=now>\n</function>\n</tool_call>",
        "plain < text",
    ),
    *called("seed_oss", XML.replace("tool_call>", "seed:tool_call>")),
    *called("glm45", GLM, f"So:{GLM}{GLM}", "<tool_call>now</tool_call>", "plain"),
    *called("deepseek_v3", deep(f"So <CALLS>{FENCED}\n{FENCED}</CALLS>"), "plain"),
    *called(
        "deepseek_v31",
        deep('So <CALLS><CALL>add<SEP>{"a": 1}</CALL><CALL>now<SEP>{}</CALL></CALLS>'),
        "plain",
    ),
]

# Texts that vLLM's parsers read in another way: its answer, and ours.
DIFFERENCES: dict[str, tuple[Case, list[Any], list[Any]]] = {
    "a stream loses a closing tag in the content, the whole text keeps it": (
        Case("stream", "deepseek_r1", "a</think>So </think> x"),
        ["a", "So  x"],
        ["a", "So </think> x"],
    ),
    "a call that was cut is called without its argument": (
        Case("tools", "qwen3_coder", "<tool_call><function=add><parameter=a>1", TOOLS),
        ["", [["add", {}]]],
        ["<tool_call><function=add><parameter=a>1", []],
    ),
    "white space at the reasoning's end is removed": (
        Case("reasoning", "glm45", "<think>Why?\n</think>So."),
        ["Why?", "So."],
        ["Why?\n", "So."],
    ),
}

OURS: dict[str, ReasoningUse | ToolFormat] = {
    "qwen3": ReasoningUse(THINK, is_open=True, ends=("<tool_call>",)),
    "deepseek_r1": ReasoningUse(THINK, is_open=True),
    "minimax_m2": ReasoningUse(THINK, is_open=True),
    "glm45": ReasoningUse(THINK, is_open=True),
    "kimi_k2": ReasoningUse(THINK),
    "seed_oss": ReasoningUse(SEED, is_open=True),
    "mistral": ReasoningUse(MISTRAL),
    "hermes": ToolFormat.HERMES,
    "llama3_json": ToolFormat.LLAMA3_JSON,
    "llama4_pythonic": ToolFormat.PYTHONIC,
    "pythonic": ToolFormat.PYTHONIC,
    "qwen3_coder": ToolFormat.QWEN_XML,
    "deepseek_v3": ToolFormat.DEEPSEEK_V3,
    "deepseek_v31": ToolFormat.DEEPSEEK_V31,
}
CALL_FORMATS = {
    "mistral": ToolFormat.MISTRAL,
    "seed_oss": ToolFormat.SEED_XML,
    "glm45": ToolFormat.GLM,
}


def new_reader(case: Case) -> OutputReader:
    if case.kind == "tools":
        form = CALL_FORMATS.get(case.parser) or OURS[case.parser]
        assert isinstance(form, ToolFormat)
        return OutputReader(None, reader_of(form, {"add": SCHEMA}))
    use = OURS[case.parser]
    assert isinstance(use, ReasoningUse)
    return OutputReader(use, None)


def parts_of(case: Case, pieces: list[Piece]) -> list[Any]:
    content = "".join(piece for piece in pieces if isinstance(piece, str))
    if case.kind == "tools":
        calls = [one for one in pieces if isinstance(one, ToolCall)]
        return [content, [[call.name, json.loads(call.arguments)] for call in calls]]
    return ["".join(one.text for one in pieces if isinstance(one, Reasoning)), content]


def read(case: Case, cuts: list[int]) -> list[Any]:
    reader = new_reader(case)
    pieces: list[Piece] = []
    for begins, ends in zip([0, *cuts], [*cuts, len(case.text)], strict=True):
        pieces += reader.feed(case.text[begins:ends])
    return parts_of(case, pieces + reader.finish())


def all_cuts(text: str) -> list[list[int]]:
    """The whole text, two pieces at each place, and pieces of each size up to that of a tag."""
    sizes = [list(range(size, len(text), size)) for size in range(1, 24)]
    return [[], *([place] for place in range(1, len(text))), *sizes]


@pytest.fixture(scope="module")
def vllm_parts() -> dict[str, list[Any]]:
    """The parts that vLLM's parsers find, by case."""
    cases = [*CASES, *(case for case, _, _ in DIFFERENCES.values())]
    given = json.dumps([asdict(case) for case in cases])
    found = json.loads(judge(Path(__file__).with_name("parse_by_vllm.py"), given))
    parts = {}
    for case, answer in zip(cases, found, strict=True):
        assert isinstance(answer, list), (case, answer)
        if case.kind == "tools":
            answer = [answer[0], [[name, json.loads(text)] for name, text in answer[1]]]
        parts[repr(case)] = answer
    return parts


def test_texts_have_the_parts_that_vllm_finds(vllm_parts: dict[str, list[Any]]) -> None:
    for case in CASES:
        expected = vllm_parts[repr(case)]
        if case.kind == "tools" and expected[1]:
            # Some of its parsers keep the white space before a call; ours drops it.
            expected = [expected[0].rstrip(), expected[1]]
        for cuts in all_cuts(case.text):
            assert read(case, cuts) == expected, (case, cuts)


@pytest.mark.parametrize("name", DIFFERENCES)
def test_known_differences(vllm_parts: dict[str, list[Any]], name: str) -> None:
    case, theirs, ours = DIFFERENCES[name]
    assert vllm_parts[repr(case)] == theirs, (
        "vLLM has changed: docs/reasoning.md names this difference"
    )
    for cuts in all_cuts(case.text):
        assert read(case, cuts) == ours


def test_each_format_but_harmony_is_compared() -> None:
    forms = {CALL_FORMATS.get(case.parser) or OURS[case.parser] for case in CASES if case.tools}
    assert forms == set(ToolFormat) - {ToolFormat.HARMONY}
