"""Attribution compared with the plainest code, over corpora that hypothesis generates."""

import dataclasses
import math
import random
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given, settings, strategies as st
from pydantic import ValidationError

from app.core.errors import InvalidRequestError
from app.infini_gram import attribution
from app.infini_gram.attribution import (
    AttributionParameters,
    AttributionRequest,
    attribute,
    delimiter_ids,
)
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.engine import Engine
from app.infini_gram.tokenizer import ByteTokenizer, FileTokenizer
from tests import brute_attribution
from tests.brute_attribution import Corpus, cut_text
from tests.index_files import Shard, Text, write_index

# Long enough for every text below: see `test_the_first_suffix`.
_FIRST = Text([0] * 400)
_LETTERS = "ab .\nÃé"


def documents(alphabet: str) -> st.SearchStrategy[list[list[str]]]:
    """One or two shards of a few documents."""
    text = st.text(alphabet, max_size=30)
    return st.lists(st.lists(text, min_size=1, max_size=5), min_size=1, max_size=2)


WANTED = st.fixed_dictionaries(
    {
        "delimiters": st.lists(st.sampled_from([".", "\n", "a", " b", "é"]), max_size=3),
        "allowSpansWithPartialWords": st.booleans(),
        "minimumSpanLength": st.integers(1, 4),
        "maximumFrequency": st.integers(1, 12),
        "maximumSpanDensity": st.sampled_from([0.01, 0.05, 0.2, 0.5, 1.0, 3.0]),
        "spanRankingMethod": st.sampled_from(["length", "unigram_logprob_sum"]),
        "maximumDocumentsPerSpan": st.integers(1, 6),
        "maximumContextLength": st.integers(1, 12),
        "maximumContextLengthLong": st.integers(1, 12),
        "maximumContextLengthSnippet": st.integers(1, 12),
    }
)


def both(
    shards: list[Shard],
    tokenizer: ByteTokenizer | FileTokenizer,
    source: str,
    text: str,
    wanted: dict[str, Any],
    brute: Callable[[Corpus], dict[str, Any]],
) -> None:
    """Ours and the plain answer are the same."""
    with tempfile.TemporaryDirectory() as name:
        write_index(Path(name), shards, tokenizer)
        engine = Engine(Declaration("corpus", Path(name), source))
        ours = attribute(engine, AttributionParameters.model_validate(wanted), text)
    width = 1 if source == BYTES else 2
    expected = brute(Corpus(shards, width))
    for mine, plain in zip(ours["spans"], expected["spans"], strict=False):
        assert mine["unigramLogprobSum"] == pytest.approx(plain["unigramLogprobSum"])
        plain["unigramLogprobSum"] = mine["unigramLogprobSum"]
    assert ours == expected


_settings = settings(max_examples=80)


@_settings
@given(texts=documents(_LETTERS), response=st.text(_LETTERS, max_size=40), wanted=WANTED)
def test_attributions_of_bytes_are_those_by_brute_force(
    texts: list[list[str]], response: str, wanted: dict[str, Any]
) -> None:
    shards = [
        [_FIRST, *(Text(list(text.encode()), {"n": n, "of": text}) for n, text in enumerate(shard))]
        for shard in texts
    ]

    offsets = [(n, n + 1) for n, letter in enumerate(response) for _ in letter.encode()]

    def brute(corpus: Corpus) -> dict[str, Any]:
        return brute_attribution.attribute(
            corpus,
            "corpus",
            list(response.encode()),
            cut_text(response, offsets),
            lambda ids: bytes(ids).decode("utf-8", "replace"),
            {byte for delimiter in wanted["delimiters"] for byte in delimiter.encode()},
            set(b" \n"),
            wanted,
        )

    both(shards, ByteTokenizer(), BYTES, response, wanted, brute)


TRAINED_ON = [
    "the cat sat on the mat. the cat is on the hat.\n",
    "a hat is a mat, and the cat has a hat. That is that.\n\n",
    "cats chat at the theatre. the rest is a rest.",
] * 3


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of byte-level pairs, with words that begin with a space and words that do not."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(
        TRAINED_ON,
        tokenizers.trainers.BpeTrainer(
            vocab_size=400,
            min_frequency=1,
            show_progress=False,
            # Its id is 0, and no text has it.
            special_tokens=["<|endoftext|>"],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(file))
    return file


_WORDS = [
    "the",
    " the",
    " cat",
    "cat",
    " hat",
    "at",
    " is",
    ".",
    "\n",
    " a",
    "s",
    "th",
    " é",
    " on",
]


@_settings
@given(
    texts=st.lists(
        st.lists(st.lists(st.sampled_from(_WORDS), max_size=12), min_size=1, max_size=4),
        min_size=1,
        max_size=2,
    ),
    response=st.lists(st.sampled_from(_WORDS), max_size=16),
    wanted=WANTED,
)
def test_attributions_of_words_are_those_by_brute_force(
    words: Path, texts: list[list[list[str]]], response: list[str], wanted: dict[str, Any]
) -> None:
    library = tokenizers.Tokenizer.from_file(str(words))
    shards = [
        [_FIRST, *(Text(library.encode("".join(parts)).ids, {"parts": parts}) for parts in shard)]
        for shard in texts
    ]
    text = "".join(response)
    encoding = library.encode(text)
    starts = {
        token for spelling, token in library.get_vocab().items() if spelling[0] in "\u0120\u010a"
    }

    def brute(corpus: Corpus) -> dict[str, Any]:
        return brute_attribution.attribute(
            corpus,
            "corpus",
            encoding.ids,
            cut_text(text, encoding.offsets),
            lambda ids: library.decode(ids, skip_special_tokens=False),
            {one for delimiter in wanted["delimiters"] for one in library.encode(delimiter).ids},
            starts,
            wanted,
        )

    both(shards, FileTokenizer(words), str(words), text, wanted, brute)


# -- Rule by rule


TEXT = "one two three. four five six seven. "
MEMBERS = {
    "left", "right", "length", "count", "unigramLogprobSum", "text", "tokenIds", "documents",
}  # fmt: skip
DOCUMENT_MEMBERS = {
    "documentIndex", "documentLength", "displayLength", "needleOffset", "metadata", "tokenIds",
    "text", "blocked", "displayLengthLong", "needleOffsetLong", "textLong", "displayOffsetSnippet",
    "needleOffsetSnippet", "textSnippet",
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Forty documents of bytes; the odd ones have all of TEXT, the others its beginning."""
    shard = [_FIRST]
    shard += [
        Text(list((f"{n} " + TEXT * (n % 2) + TEXT[:8]).encode()), {"n": n}) for n in range(40)
    ]
    directory = tmp_path_factory.mktemp("index") / "corpus"
    write_index(directory, [shard], ByteTokenizer())
    return Engine(Declaration("corpus", directory, BYTES))


def ask(engine: Engine, text: str, **members: Any) -> dict[str, Any]:
    wanted = {"maximumFrequency": 1000, "maximumSpanDensity": 1.0} | members
    return attribute(engine, AttributionParameters.model_validate(wanted), text)


def test_members_of_an_attribution(engine: Engine) -> None:
    answer = ask(engine, TEXT)
    assert answer.keys() == {"index", "inputTokens", "spans"}
    assert answer["index"] == "corpus"
    assert answer["inputTokens"] == list(TEXT)
    (span,) = answer["spans"]
    assert span.keys() == MEMBERS
    assert all(document.keys() == DOCUMENT_MEMBERS for document in span["documents"])
    assert (span["count"], len(span["documents"])) == (20, 10)
    assert orjson.loads(orjson.dumps(answer)) == answer


def test_defaults_and_spellings() -> None:
    """As the description has them; either spelling; what was removed in 2025 is ignored."""
    assert AttributionParameters().model_dump(by_alias=True) == {
        "delimiters": [],
        "allowSpansWithPartialWords": False,
        "minimumSpanLength": 1,
        "maximumFrequency": 10,
        "maximumSpanDensity": 0.05,
        "spanRankingMethod": "length",
        "maximumDocumentsPerSpan": 10,
        "maximumContextLength": 250,
        "maximumContextLengthLong": 100,
        "maximumContextLengthSnippet": 40,
    }
    removed = {
        "prompt": "x",
        "includeDocuments": True,
        "includeInputAsTokens": True,
        "filterMethod": "bm25",
        "filterBm25FieldsConsidered": "prompt|response",
        "filterBm25RatioToKeep": 1.0,
        "maximumDocumentDisplayLength": 100,
        "maximumDocumentContextLengthRetrieved": 250,
        "response": "of AttributionRequest alone",
    }
    camel = {"maximumFrequency": 1_000_000, "spanRankingMethod": "unigram_logprob_sum"}
    snake = {"maximum_frequency": 1_000_000, "span_ranking_method": "unigram_logprob_sum"}
    read = AttributionParameters.model_validate
    assert read(camel | removed) == read(snake)
    request = AttributionRequest.model_validate(snake | {"response": ""})
    assert (request.response, request.maximum_frequency) == ("", 1_000_000)


@pytest.mark.parametrize(
    "members",
    [
        {name: value}
        for name in (
            "minimumSpanLength", "maximumFrequency", "maximumDocumentsPerSpan",
            "maximumContextLength", "maximumContextLengthLong", "maximumContextLengthSnippet",
        )
        for value in (0, -1, 10**7, 10**40, 1.5, "many", None, [1])
    ]
    + [{"maximumSpanDensity": value} for value in (0, -0.5, math.nan, math.inf, "dense", None)]
    + [{"spanRankingMethod": value} for value in ("", "bm25", None, 1)]
    + [{"delimiters": value} for value in ("x", [1], [None], ["x"] * 101, ["x" * 101])]
    + [{"allowSpansWithPartialWords": value} for value in ("perhaps", 2, None)],
)  # fmt: skip
def test_bad_parameters(members: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as refused:
        AttributionRequest.model_validate({"response": "x"} | members)
    assert refused.value.errors()[0]["loc"][0] == next(iter(members))


def test_a_bad_response() -> None:
    for members in ({}, {"response": None}, {"response": 1}, {"response": "x" * 100_001}):
        with pytest.raises(ValidationError):
            AttributionRequest.model_validate(members)


def test_no_text(engine: Engine) -> None:
    assert ask(engine, "") == {"index": "corpus", "inputTokens": [], "spans": []}


def test_text_that_cannot_be_encoded(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate"):
        ask(engine, "a\ud800b")


def test_a_delimiter_ends_a_span(engine: Engine) -> None:
    """The delimiter is the span's last token. Each of several delimiters ends a span."""

    def texts(*delimiters: str) -> list[str]:
        answer = ask(engine, TEXT, delimiters=list(delimiters), allowSpansWithPartialWords=True)
        return [span["text"] for span in answer["spans"]]

    assert texts() == [TEXT]
    assert texts(".") == ["one two three.", " four five six seven.", " "]
    assert texts("e.") == texts(".", "e")
    assert texts("", "#") == texts()


def test_delimiters_that_an_index_declares(engine: Engine) -> None:
    declared = dataclasses.replace(engine.declaration, delimiters={"end": 46})
    assert delimiter_ids(Engine(declared), ["end", ".", "ab", "a"]) == [46, 97, 98]


def test_frequency_and_length(engine: Engine) -> None:
    def count(text: str, **members: Any) -> list[int]:
        answer = ask(engine, text, allowSpansWithPartialWords=True, **members)
        return [span["count"] for span in answer["spans"]]

    assert count(TEXT[:8]) == [60]
    assert count(TEXT[:8], maximumFrequency=60) == [60]
    assert count(TEXT[:8], maximumFrequency=59) == []
    assert count(TEXT, minimumSpanLength=len(TEXT)) == [20]
    assert count(TEXT, minimumSpanLength=len(TEXT) + 1) == []


def test_whole_words(engine: Engine) -> None:
    """A span begins where a word does, and ends before one, or where the text ends."""

    def texts(text: str, *, partial: bool) -> list[str]:
        answer = ask(engine, text, allowSpansWithPartialWords=partial)
        return [span["text"] for span in answer["spans"]]

    assert texts("# two threw", partial=True) == [" two thre", "w"]
    assert texts("# two threw", partial=False) == [" two"]
    assert texts(" two thre", partial=False) == [" two thre"]
    assert texts("two thre", partial=False) == [" thre"]


def test_the_density_keeps_the_best(engine: Engine) -> None:
    """As many as the tokens allow, rounded up; in the order of the text."""
    text = "four#one two#five six seven#two"

    def kept(density: float, method: str = "length") -> list[str]:
        answer = ask(
            engine,
            text,
            maximumSpanDensity=density,
            spanRankingMethod=method,
            allowSpansWithPartialWords=True,
        )
        return [span["text"] for span in answer["spans"]]

    tokens = len(text)
    assert kept(1.0) == kept(1e300) == ["four", "one two", "five six seven", "two"]
    assert kept(3 / tokens) == ["four", "one two", "five six seven"]
    assert kept(2 / tokens) == ["one two", "five six seven"]
    assert kept(1.01 / tokens) == ["one two", "five six seven"]
    assert kept(0.001) == ["five six seven"]
    assert kept(0.001, "unigram_logprob_sum") == ["five six seven"]


def test_the_sample_is_always_the_same(engine: Engine) -> None:
    """As Python's random.sample chooses after seed 42, in its order."""
    whole = ask(engine, TEXT, maximumDocumentsPerSpan=1000)["spans"][0]["documents"]
    random.seed(42)
    expected = random.sample(whole, 7)
    state = random.getstate()
    for _ in range(2):
        assert ask(engine, TEXT, maximumDocumentsPerSpan=7)["spans"][0]["documents"] == expected
    assert random.getstate() == state  # what others draw is not changed


def test_windows(engine: Engine) -> None:
    """Each has at most so many tokens on each side; the first cuts what the others may show."""
    answer = ask(
        engine,
        "five",
        maximumContextLength=5,
        maximumContextLengthLong=20,
        maximumContextLengthSnippet=2,
        maximumDocumentsPerSpan=1,
        allowSpansWithPartialWords=True,
    )
    (document,) = answer["spans"][0]["documents"]
    assert (document["text"], document["needleOffset"], document["displayLength"]) == (
        "four five six ", 5, 14,
    )  # fmt: skip
    assert document["textLong"] == document["text"]
    assert (document["needleOffsetLong"], document["displayLengthLong"]) == (5, 14)
    assert (document["textSnippet"], document["needleOffsetSnippet"]) == ("r five s", 2)
    assert document["displayOffsetSnippet"] == 8


def test_it_can_be_stopped_between_all_steps(engine: Engine) -> None:
    class StoppedError(Exception):
        pass

    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    parameters = AttributionParameters(maximum_frequency=1000)
    answer = attribute(engine, parameters, TEXT * 3, count)
    assert calls > sum(len(span["documents"]) for span in answer["spans"]) > 0
    for last in range(calls):
        left = iter(range(last))

        def stop(left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise StoppedError

        with pytest.raises(StoppedError):
            attribute(engine, parameters, TEXT * 3, stop)


def refused(engine: Engine, field: str, text: str, **members: Any) -> str:
    with pytest.raises(InvalidRequestError) as raised:
        ask(engine, text, **members)
    assert raised.value.errors[0].field == field
    return str(raised.value)


def test_bounds_of_one_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "16,384 are most" in refused(engine, "response", "é" * 8193)
    assert "100,000 are most" in refused(engine, "response", "x" * 100_001)
    monkeypatch.setattr(attribution, "MAX_DOCUMENT_TOKENS", 400)
    assert "less context" in refused(engine, "maximumContextLength", TEXT)
    assert ask(engine, TEXT, maximumContextLength=2)["spans"]


@pytest.mark.parametrize("partial", [True, False])
def test_places_are_bounded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, *, partial: bool
) -> None:
    """The requested number, or all spans: each span of the engine, except those within others."""
    members = {"maximumContextLength": 2, "allowSpansWithPartialWords": partial}
    whole, twos = ask(engine, TEXT, **members), ask(engine, " two\n" * 9, **members)
    assert [span["count"] for span in twos["spans"]] == [60] * 9
    monkeypatch.setattr(attribution, "MAX_PLACES", 12 * 45)
    assert ask(engine, TEXT, **members) == whole
    assert ask(engine, " two\n" * 9, **members) == twos
    monkeypatch.setattr(attribution, "MAX_PLACES", 12 * 45 - 1)
    assert "11 is safe" in refused(engine, "maximumFrequency", " two\n" * 9, **members)
    assert ask(engine, " two\n" * 9, maximumFrequency=11, **members)["spans"] == []
    # A delimiter makes spans shorter, and so more of them.
    monkeypatch.setattr(attribution, "MAX_PLACES", 5 * 36)
    assert ask(engine, TEXT, **members) == whole
    assert refused(engine, "maximumFrequency", TEXT, delimiters=[" "], **members)
    # A text without occurrences has no positions.
    assert ask(engine, "#%&" * 12, **members)["spans"] == []


@_settings
@given(response=st.text("onetw hrfuivs.", min_size=1, max_size=60), partial=st.booleans())
def test_the_bound_of_places_is_one(engine: Engine, response: str, *, partial: bool) -> None:
    """No text that is taken has more places than allowed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attribution, "MAX_PLACES", 300)
        try:
            answer = ask(
                engine, response, allowSpansWithPartialWords=partial, delimiters=["n"],
                maximumDocumentsPerSpan=1,
            )  # fmt: skip
        except InvalidRequestError:
            return
    assert sum(span["count"] for span in answer["spans"]) <= 300


def test_the_first_suffix(tmp_path: Path) -> None:
    """The engine looks at no neighbour of a text that would stand before all of the corpus.

    So the reference finds nothing here, where "aa" occurs, and so do we.
    """
    write_index(tmp_path, [[Text(list(b"ab"))]], ByteTokenizer())
    alone = Engine(Declaration("corpus", tmp_path, BYTES))
    assert ask(alone, "aa", allowSpansWithPartialWords=True)["spans"][0]["left"] == 1
    assert [
        span["text"] for span in ask(alone, "ab", allowSpansWithPartialWords=True)["spans"]
    ] == ["ab"]
