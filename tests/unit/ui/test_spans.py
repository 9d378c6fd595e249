"""Positions of spans in a text: tokens that share characters, gaps, overlaps."""

import random

import pytest

from app.infini_gram.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from app.ui.attributions import MAX_DOCUMENTS, MAX_SPANS, to_attribution
from app.ui.spans import Segment, cut, locate, split_at, to_characters
from tests.indexes import DEMO_TOKENIZER

TEXTS = (
    "def read(self, size=-1):\n    return self._file.read(size)\n",
    "Grüße aus 東京, 🙂🙂🙂 ééé aaaa    ",
    "",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 ok",
    "<script>alert('&amp;')</script>",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), FileTokenizer(DEMO_TOKENIZER)])
def test_tokens_are_found_where_the_tokenizer_has_them(text: str, tokenizer: Tokenizer) -> None:
    ids, offsets = tokenizer.encode_with_offsets(text)
    pieces = tokenizer.pieces(text)
    assert len(ids) == len(offsets) == len(pieces)
    located = locate(text, pieces)
    if pieces and not pieces[0]:  # the first token is cut where it shares its character
        assert located.pop(0) == (0, 0)
        offsets.pop(0)
    assert located == offsets


def test_characters_that_no_token_has_are_skipped() -> None:
    assert locate("one  two", ["one", "two"]) == [(0, 3), (5, 8)]
    assert locate("x" * 5000 + "two", ["one", "two"]) == [(0, 0), (0, 0)]


def test_a_long_text_of_equal_tokens_is_located_in_time() -> None:
    ranges = locate("ab" * 50_000, ["ab"] * 50_000)
    assert ranges[-1] == (99_998, 100_000)


def test_a_span_that_is_none_covers_nothing() -> None:
    ranges = [(0, 2), (2, 5)]
    assert to_characters(ranges, 0, 2) == (0, 5)
    for left, right in ((0, 3), (-1, 1), (1, 1), (2, 1)):
        assert to_characters(ranges, left, right) == (0, 0)


def test_overlapping_spans_share_segments() -> None:
    assert cut("abcdef", [(1, 4), (3, 6), (2, 2)]) == [
        Segment("a", ()),
        Segment("bc", (0,)),
        Segment("d", (0, 1)),
        Segment("ef", (1,)),
    ]
    assert cut("abc", [(0, 3), (0, 3), (1, 2)]) == [
        Segment("a", (0, 1)),
        Segment("b", (0, 1, 2)),
        Segment("c", (0, 1)),
    ]
    assert cut("", []) == []


def test_segments_join_to_the_text_for_all_spans() -> None:
    chooser = random.Random(5)  # noqa: S311 # no secret
    for _ in range(200):
        text = "".join(chooser.choices("ab é🙂\n", k=chooser.randrange(30)))
        spans = [
            (chooser.randint(0, len(text)), chooser.randint(0, len(text)))
            for _ in range(chooser.randrange(6))
        ]
        segments = cut(text, spans)
        assert "".join(one.text for one in segments) == text
        place = 0
        for segment in segments:
            middle = place + len(segment.text) / 2
            covering = {at for at, (start, end) in enumerate(spans) if start < middle < end}
            assert set(segment.spans) == covering
            place += len(segment.text)


def test_the_occurrence_is_chosen_that_is_nearest() -> None:
    snippet = "read it, then read it again, and read on"
    assert split_at(snippet, " read", 0.4) == ("read it, then", " read", " it again, and read on")
    assert split_at("read\n", " read ", 0.5) == ("", "read", "\n")
    assert split_at(snippet, "read", 0.0)[0] == ""
    assert split_at(snippet, "read", 1.0)[2] == " on"
    assert split_at(snippet, "\N{REPLACEMENT CHARACTER} it", 0.1)[1] == " it"
    assert split_at(snippet, "write", 0.5) == (snippet, "", "")
    assert split_at("ab", " ", 0.5) == ("ab", "", "")


def document(number: int) -> dict[str, object]:
    return {
        "documentIndex": number,
        "documentLength": 9,
        "metadata": {"path": "a.jsonl", "linenum": 3, "metadata": {"title": "<b>"}},
        "textSnippet": "x two y",
        "needleOffset": 1,
        "needleOffsetSnippet": 1,
        "displayOffsetSnippet": 3,
    }


def span(left: int, right: int, documents: int = 1) -> dict[str, object]:
    return {
        "left": left,
        "right": right,
        "length": right - left,
        "count": 7,
        "text": "two",
        "documents": [document(number) for number in range(documents)],
    }


def test_an_attribution_is_shown_in_part_and_counted_whole() -> None:
    answer = {
        "index": "small",
        "inputTokens": ["one ", "two ", "three"],
        "spans": [span(1, 2, documents=50), *(span(0, 1) for _ in range(1000))],
    }
    shown = to_attribution(answer, None, None)
    assert "".join(one.text for one in shown["segments"]) == "one two three"
    assert (len(shown["spans"]), shown["span_count"]) == (MAX_SPANS, 1001)
    assert (len(shown["documents"]), shown["document_count"]) == (MAX_DOCUMENTS, 50)
    first = shown["documents"][0]
    assert (first["before"], first["match"], first["behind"]) == ("x ", "two", " y")
    assert first["title"] == "<b>"
    assert to_attribution(answer, None, 3)["chosen"] == 3
    assert to_attribution(answer, None, 9999)["chosen"] == 0


def test_an_attribution_without_spans_has_nothing_to_choose() -> None:
    shown = to_attribution({"index": "small", "inputTokens": ["a"], "spans": []}, "a", 0)
    assert (shown["chosen"], shown["documents"], shown["covered"]) == (None, [], 0.0)
