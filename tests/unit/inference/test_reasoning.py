"""Reasoning in a model's text: found in each format, for all cuts of the text."""

from itertools import cycle

import pytest
from hypothesis import example, given, strategies as st

from app.inference.reasoning import (
    OutputReader,
    Piece,
    Reasoning,
    ReasoningFormat,
    ReasoningUse,
    detect_reasoning,
    read_output,
)
from app.inference.tool_calls import ToolCall, ToolFormat, reader_of

THINK, MISTRAL = ReasoningFormat.THINK, ReasoningFormat.MISTRAL
HARMONY, SEED, COHERE = ReasoningFormat.HARMONY, ReasoningFormat.SEED, ReasoningFormat.COHERE
OPEN = ReasoningUse(THINK, is_open=True)
NOW = ToolCall("now", "{}")


def new_reader(use: ReasoningUse, tools: ToolFormat | None = None) -> OutputReader:
    return OutputReader(use, reader_of(tools) if tools else None)


def join(pieces: list[Piece]) -> tuple[str, str, list[ToolCall]]:
    """The reasoning, the content and the calls."""
    return (
        "".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        "".join(piece for piece in pieces if isinstance(piece, str)),
        [piece for piece in pieces if isinstance(piece, ToolCall)],
    )


def read_whole(reader: OutputReader, text: str) -> tuple[str, str, list[ToolCall]]:
    return join(reader.feed(text) + reader.finish())


def read_in_pieces(
    reader: OutputReader, text: str, sizes: list[int]
) -> tuple[str, str, list[ToolCall]]:
    """Read a text that is cut into pieces of these sizes, again and again."""
    pieces, at = [], 0
    for size in cycle(sizes):
        if at >= len(text):
            break
        pieces += reader.feed(text[at : at + size])
        at += size
    return join(pieces + reader.finish())


TEXTS: list[tuple[ReasoningUse, str, str, str]] = [
    (ReasoningUse(THINK), "<think>\nWhy?\n</think>\n\nSo.", "\nWhy?\n", "\n\nSo."),
    (ReasoningUse(THINK), "\n<think>Why?</think>So.", "Why?", "So."),
    (ReasoningUse(THINK), "So <think>no</think>.", "", "So <think>no</think>."),
    (ReasoningUse(THINK), "No tag</think>.", "", "No tag</think>."),
    (ReasoningUse(THINK), "<think>Why", "Why", ""),
    (ReasoningUse(THINK), "<think>Why</thi", "Why</thi", ""),
    (ReasoningUse(THINK), "<think></think>", "", ""),
    (ReasoningUse(THINK), "<think>a</think>b</think>c", "a", "b</think>c"),
    (ReasoningUse(THINK), "<think>a <think> b</think>c", "a <think> b", "c"),
    (ReasoningUse(THINK), "<thi", "", "<thi"),
    (ReasoningUse(THINK), "", "", ""),
    (ReasoningUse(THINK), " \n", "", " \n"),
    (ReasoningUse(THINK), " " * 256 + "<think>a</think>b", "a", "b"),
    (ReasoningUse(THINK), " " * 257 + "<think>a", "", " " * 257 + "<think>a"),
    (OPEN, "Why?\n</think>\n\nSo.", "Why?\n", "\n\nSo."),
    (OPEN, " <think>Why?</think>So.", "Why?", "So."),
    (OPEN, "Why?", "Why?", ""),
    (OPEN, "\n", "\n", ""),
    (OPEN, "</think>So.", "", "So."),
    (OPEN, "a </thin </think>So.", "a </thin ", "So."),
    (ReasoningUse(SEED), "<seed:think>Why?</seed:think>So.", "Why?", "So."),
    (ReasoningUse(MISTRAL), "[THINK]a[/THINK]b[THINK]c[/THINK]d", "ac", "bd"),
    (ReasoningUse(MISTRAL), "b[THINK]c", "c", "b"),
    (
        ReasoningUse(COHERE),
        "<|START_THINKING|>a<|END_THINKING|><|START_RESPONSE|>b<|END_RESPONSE|>",
        "a",
        "b",
    ),
    (
        ReasoningUse(HARMONY),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|return|>",
        "a",
        "b",
    ),
    (ReasoningUse(HARMONY), "<|channel|>analysis<|message|>a <b", "a <b", ""),
    (ReasoningUse(HARMONY), "<|channel|>final<|message|>a<|b", "", "a<|b"),
    (ReasoningUse(HARMONY), "<|channel|>final <|constrain|>json<|message|>{}", "", "{}"),
    (ReasoningUse(HARMONY), "no message", "", "no message"),
    (ReasoningUse(HARMONY), "no message<|end|>", "", "no message"),
    (ReasoningUse(HARMONY), "x" * 2000, "", "x" * 2000),
    (ReasoningUse(HARMONY), "<|channel|>final", "", ""),
    (
        ReasoningUse(HARMONY),
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b"
        "<|end|><|start|>assistant<|channel|>commentary<|message|>c<|end|>"
        "<|start|>assistant<|channel|>final<|message|>d",
        "a\nb",
        "c\nd",
    ),
    (
        ReasoningUse(HARMONY),
        "<|channel|>commentary to=browser.search<|message|>x<|call|>",
        "",
        "",
    ),
]


@pytest.mark.parametrize(("use", "text", "reasoning", "content"), TEXTS)
def test_reasoning_is_split_from_content(
    use: ReasoningUse, text: str, reasoning: str, content: str
) -> None:
    assert read_whole(new_reader(use), text) == (reasoning, content, [])
    for size in range(1, 9):
        assert read_in_pieces(new_reader(use), text, [size]) == (reasoning, content, [])


@pytest.mark.parametrize(
    "text",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}<|call|>",
        " to=functions.now<|channel|>commentary json<|message|>{ }",
        "<|channel|>commentary to=functions.now<|constrain|>json<|message|>{}",
        "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
    ],
)
def test_harmony_has_calls(text: str) -> None:
    text = f"<|channel|>analysis<|message|>a<|end|><|start|>assistant{text}"
    for sizes in ([1], [3, 8], [len(text)]):
        assert read_in_pieces(new_reader(ReasoningUse(HARMONY)), text, sizes) == ("a", "", [NOW])


def test_arguments_that_are_no_json_stay_as_they_are() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{x"
    _, _, calls = read_whole(new_reader(ReasoningUse(HARMONY)), text)
    assert calls == [ToolCall("f", "{x")]


def test_tool_calls_are_read_in_the_content_alone() -> None:
    call = '<tool_call>{"name": "now"}</tool_call>'
    text = f"<think>{call}</think>So.{call}"
    use = ReasoningUse(THINK)  # without the openings of calls
    for sizes in ([1], [7], [len(text)]):
        read = read_in_pieces(new_reader(use, ToolFormat.HERMES), text, sizes)
        assert read == (call, "So.", [NOW])


def test_an_opening_of_a_call_ends_reasoning_that_is_not_closed() -> None:
    text = 'I call.<tool_call>{"name": "now"}</tool_call>'
    use = ReasoningUse(THINK, is_open=True, ends=("<tool_call>",))
    for sizes in ([1], [7], [len(text)]):
        read = read_in_pieces(new_reader(use, ToolFormat.HERMES), text, sizes)
        assert read == ("I call.", "", [NOW])
        read = read_in_pieces(new_reader(use, ToolFormat.HERMES), f"{text}</think>So.", sizes)
        assert read == ("I call.", "So.", [NOW])


def test_text_without_rules_is_content() -> None:
    assert read_output(OutputReader(None, None), "<think>a") == ("", ["<think>a"])
    assert read_output(OutputReader(OPEN, None), "a</think>b") == ("a", ["b"])
    assert OutputReader(None, None).feed("") == []


def test_text_that_begins_no_tag_is_not_held_back() -> None:
    reader = new_reader(OPEN)
    assert reader.feed("plain") == [Reasoning("plain")]
    assert reader.feed("text</th") == [Reasoning("text")]
    assert reader.feed("ink>") == []
    assert reader.feed("So <") == ["So <"]


FRAGMENTS = st.sampled_from(
    [
        "<think>", "</think>", "<", "</", "think", "[THINK]", "[/THINK]", "[", "<seed:think>",
        "</seed:think>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|channel|>",
        "<|message|>", "<|end|>", "<|start|>", "assistant", "analysis", "final", "commentary", "<|call|>",
        " to=functions.f", "<|constrain|>json", "{}", " ", "\n", "a", "🙂", "<|", "<tool_call>", "x" * 600,
    ]
)  # fmt: skip
USES = [ReasoningUse(one, is_open) for one in ReasoningFormat for is_open in (False, True)]


@given(
    st.lists(FRAGMENTS, max_size=14).map("".join) | st.text(max_size=40),
    st.lists(st.integers(1, 9), min_size=1, max_size=40),
    st.sampled_from([*USES, ReasoningUse(THINK, is_open=True, ends=("<tool_call>",))]),
)
@example("<|channel|>" + "x" * 1200 + "<|message|>a", [1], ReasoningUse(HARMONY))
@pytest.mark.trial
def test_the_cuts_change_nothing(text: str, sizes: list[int], use: ReasoningUse) -> None:
    assert read_in_pieces(new_reader(use), text, sizes) == read_whole(new_reader(use), text)


@given(st.lists(FRAGMENTS, max_size=14).map("".join), st.booleans())
def test_no_text_is_lost_but_tags(text: str, is_open: bool) -> None:
    reasoning, content, _ = read_whole(new_reader(ReasoningUse(THINK, is_open)), text)
    rest = text.lstrip()
    kept = [text]
    for opening in ("", "<think>"):
        if rest.startswith(opening):
            behind = rest.removeprefix(opening) if opening else text
            kept += [behind, behind.replace("</think>", "", 1)]
    assert reasoning + content in kept


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ '<think>\\n' }}", THINK),
        ("{{ content.split('</think>')[-1] }}", THINK),
        ("{{ '[THINK]' }}", MISTRAL),
        ("{{ '<seed:think>' }}", SEED),
        ("{{ '<|START_THINKING|>' }}", COHERE),
        ("<|start|>assistant<|channel|>analysis<|message|>", HARMONY),
        ("{{ messages[0].content }}", None),
        ("", None),
    ],
)
def test_the_format_is_detected_by_the_templates_markers(
    template: str, found: ReasoningFormat | None
) -> None:
    assert detect_reasoning(template) is found


def test_rules_are_stored_and_read_again() -> None:
    for use in (OPEN, ReasoningUse(MISTRAL, ends=("<tool_call>",))):
        assert ReasoningUse.of(use.to_stored()) == use
