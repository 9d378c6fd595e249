"""Removed documents: every answer is that of an index built without them."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import EngineInputError
from app.infini_gram import reduced_engine
from app.infini_gram.attribution import AttributionParameters, attribute
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.engine import Engine
from app.infini_gram.engine_types import Document
from app.infini_gram.manifest import ManifestError
from app.infini_gram.reduced_engine import ReducedEngine, open_engine
from app.infini_gram.tokenizer import Tokenizer, open_tokenizer
from tests import brute_attribution
from tests.brute_attribution import Corpus
from tests.index_files import Shard, Text, shard_of, write_index
from tests.indexes import DEMO_TOKENIZER, build_index, some_texts, wide_tokenizer

WIDTHS = {"u8": 1, "u16": 2, "u32": 4}
# A width of a token, and the shards of each directory.
CASES = {"u8": (1,), "u16": (1, 11, 2), "u32": (2,)}
TEXT = "self return the index Grüße 東京 x1 ( ) only here: zyzzyva def self strange words. the removed self"
ALL = 1_000_000


class Case:
    """An index, the same without its removed documents, and one that was built without them."""

    def __init__(self, directory: Path, tokenizer: str, layout: Sequence[int]) -> None:
        own = open_tokenizer(tokenizer)
        chooser = random.Random(5)  # noqa: S311 # no secret
        self.whole: list[Shard] = []
        self.kept: list[Shard] = []
        gone: list[Text] = []
        paths: dict[str, list[Path]] = {"whole": [], "kept": []}
        # A word in removed documents alone, and one in all of them.
        texts = [*some_texts(), "only removed: qwrtz the removed self", "the removed self"]
        for number, shards in enumerate(layout):
            share = texts[number :: len(layout)]
            whole = [shard_of(own, share[one::shards], f"{number}.{one}") for one in range(shards)]
            kept: list[Shard] = []
            for shard in whole:
                removed = [one for one in shard[1:] if _is_removed(own, one, chooser)]
                gone += removed
                kept.append([one for one in shard if one not in removed])
            for name, made in (("whole", whole), ("kept", kept)):
                paths[name].append(directory / name / str(number))
                write_index(paths[name][-1], made, own)
            order = sorted(range(shards), key=str)
            self.whole += [whole[one] for one in order]
            self.kept += [kept[one] for one in order]
        assert len(gone) > 20
        halves = (directory / "gone.0", directory / "gone.1")
        write_index(halves[0], [gone[:7], gone[7:9]], own)
        write_index(halves[1], [gone[9:]], own)
        declaration = Declaration(
            "corpus", paths["whole"][0], tokenizer, more_paths=tuple(paths["whole"][1:])
        )
        engine = open_engine(replace(declaration, removed_paths=halves))
        assert isinstance(engine, ReducedEngine)
        self.engine = engine
        self.clean = Engine(
            replace(declaration, path=paths["kept"][0], more_paths=tuple(paths["kept"][1:]))
        )
        self.width = WIDTHS[own.dtype]

    def needles(self, count: int, seed: int) -> list[list[int]]:
        """Parts of all documents, and some that occur in none."""
        chooser = random.Random(seed)  # noqa: S311 # no secret
        texts = [text.ids for shard in self.whole for text in shard if any(text.ids)]
        found = []
        for number in range(count):
            ids = chooser.choice(texts)
            start = chooser.randrange(len(ids))
            needle = ids[start : start + chooser.randrange(1, 16)]
            if number % 5 == 1:
                needle = [*needle, chooser.randrange(self.engine.vocab_size)]
            found.append(needle)
        return found


def _is_removed(tokenizer: Tokenizer, text: Text, chooser: random.Random) -> bool:
    return "only removed" in tokenizer.decode(text.ids) or chooser.random() < 0.3


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    directory = tmp_path_factory.mktemp("case")
    if request.param == "u32":
        tokenizer = str(wide_tokenizer(directory / "tokenizer.json"))
    else:
        tokenizer = BYTES if request.param == "u8" else str(DEMO_TOKENIZER)
    return Case(directory, tokenizer, CASES[request.param])


# --- Answers ----------------------------------------------------------------------------------------


@pytest.mark.trial
def test_counts_and_probabilities(case: Case) -> None:
    ours, clean = case.engine, case.clean
    assert (ours.total_documents, ours.total_tokens) == (clean.total_documents, clean.total_tokens)
    assert ours.version not in (clean.version, Engine(replace_removed(ours)).version)
    assert ours.count([]) == clean.count([])
    gone = reduced = 0
    for needle in case.needles(200, seed=1):
        count = clean.count(needle)
        assert ours.count(needle) == count
        assert ours.find(needle).count == count.count
        assert ours.prob(needle) == clean.prob(needle)
        assert ours.infgram_prob(needle) == clean.infgram_prob(needle)
        every = Engine.count(ours, needle).count
        gone += every > count.count == 0
        reduced += every > count.count > 0
        if not count.count:
            assert all(start == end for start, end in ours.find(needle).segment_by_shard)
    assert gone > 5
    assert reduced > 50


def replace_removed(engine: ReducedEngine) -> Declaration:
    return replace(engine.declaration, removed_paths=())


@pytest.mark.trial
def test_next_tokens(case: Case) -> None:
    for needle in case.needles(60, seed=2):
        assert case.engine.ntd(needle, ALL) == case.clean.ntd(needle, ALL)
        assert case.engine.infgram_ntd(needle, ALL) == case.clean.infgram_ntd(needle, ALL)


def test_a_sample_has_no_token_of_removed_documents_alone(case: Case) -> None:
    """Estimates are of all places; a token that also follows in removed documents is counted exactly."""
    sampled = 0
    for needle in case.needles(60, seed=3):
        exact = case.clean.ntd(needle, ALL)
        found = case.engine.ntd(needle, 2)
        sampled += found.approx
        assert found.prompt_count == exact.prompt_count
        assert set(found.by_token) <= set(exact.by_token)
        assert all(count > 0 for count, _ in found.by_token.values())
    assert sampled > 10


def _pages(engine: Engine, needle: list[int], size: int) -> list[Document]:
    found = engine.find(needle)
    pages = math.ceil(found.count / size)
    places = [engine.places(found, page * size, size) for page in range(pages)]
    assert all(len(one) == size for one in places[:-1])
    assert engine.places(found, pages * size, size) == []
    return [
        engine.document_by_rank(*place, len(needle), ALL)
        for page in places
        for place in page
    ]  # fmt: skip


def _texts(documents: Sequence[Document]) -> Counter[tuple[Any, ...]]:
    return Counter(
        (tuple(one.token_ids), one.needle_offset, str(one.metadata)) for one in documents
    )


@pytest.mark.trial
def test_pages_of_documents(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_engine, "_READ_TOGETHER", 3)
    for needle in case.needles(15, seed=4):
        documents = _pages(case.engine, needle, 7)
        assert not any(one.blocked for one in documents)
        assert _texts(documents) == _texts(_pages(case.clean, needle, 7))


def test_a_page_far_back_is_refused(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduced_engine, "MAX_READ_PLACES", 20)
    monkeypatch.setattr(reduced_engine, "_READ_TOGETHER", 4)
    found = case.engine.find(case.engine.tokenizer.encode(" the"))
    assert found.count > 40
    assert len(case.engine.places(found, 0, 5)) == 5
    with pytest.raises(EngineInputError, match="20 of its places are read at most"):
        case.engine.places(found, 30, 5)


def test_documents_by_number_rank_and_pointer(case: Case) -> None:
    """Removed documents keep their numbers, and show nothing else."""
    engine, number = case.engine, 0
    kept = [id(text) for shard in case.kept for text in shard]
    blocked = 0
    for place, shard in enumerate(case.whole):
        pointer = 0
        for text in shard:
            pointer += case.width
            found = [engine.document_by_index(number, ALL)]
            if text.ids:
                found.append(engine.document_by_pointer(place, pointer, 1, ALL))
            is_kept = id(text) in kept
            for document in found:
                assert document.blocked is not is_kept
                assert document.token_ids == (text.ids if is_kept else [])
                assert document.metadata == (text.metadata if is_kept else {})
                assert document.length == (len(text.ids) if is_kept else 0)
            blocked += not is_kept
            pointer += case.width * len(text.ids)
            number += 1
    assert blocked == len(engine.removed.numbers) > 20
    assert number == engine.numbered_documents


def test_places_of_clauses_are_in_remaining_documents(case: Case) -> None:
    encode = case.engine.tokenizer.encode
    alone = encode("only removed: qwrtz the removed self")
    of_removed = [[alone[2:8]], [alone[-4:]]]
    for cnf in ([[encode(" def")], [encode(" self")]], of_removed):
        every = Engine.find_cnf(case.engine, cnf, 500_000, 50)
        found = case.engine.find_cnf(cnf, 500_000, 50)
        places = [
            (shard, pointer)
            for shard, pointers in enumerate(found.ptrs_by_shard)
            for pointer in pointers
        ]
        assert (found.count, found.approx) == (len(places), False)
        assert case.engine.count_cnf(cnf, 500_000, 50).count == found.count < every.count
        assert not any(case.engine.document_by_pointer(*one, 1, 0).blocked for one in places)
    assert case.engine.find_cnf(of_removed, 500_000, 50).count == 0
    often = [[encode(" the")], [encode(" self")]]
    estimate = case.engine.count_cnf(often, 20, 50)
    assert estimate.approx
    assert 0 < estimate.count <= Engine.count_cnf(case.engine, often, 20, 50).count


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize("delimiters", [[], [".", "self"]])
@pytest.mark.trial
def test_an_attribution_is_that_by_brute_force(
    case: Case, partial: bool, delimiters: list[str]
) -> None:
    wanted = {
        "allowSpansWithPartialWords": partial, "minimumSpanLength": 2, "maximumFrequency": 30,
        "maximumSpanDensity": 1.0, "spanRankingMethod": "unigram_logprob_sum",
        "maximumDocumentsPerSpan": 1000, "maximumContextLength": 9, "maximumContextLengthLong": 5,
        "maximumContextLengthSnippet": 2, "delimiters": delimiters,
    }  # fmt: skip
    engine = case.engine
    ours = attribute(engine, AttributionParameters.model_validate(wanted), TEXT)
    ids, offsets = engine.tokenizer.encode_with_offsets(TEXT)
    expected: dict[str, Any] = brute_attribution.attribute(
        Corpus(case.kept, case.width), "corpus", ids, brute_attribution.cut_text(TEXT, offsets),
        engine.tokenizer.decode, {one for text in delimiters for one in engine.tokenizer.encode(text)},
        set(engine.tokenizer.word_start_ids()), wanted,
    )  # fmt: skip
    assert len(ours["spans"]) > 2
    for mine, plain in zip(ours["spans"], expected["spans"], strict=True):
        assert mine.pop("unigramLogprobSum") == pytest.approx(plain.pop("unigramLogprobSum"))
        for span in (mine, plain):  # the rests of equal texts differ, and so their order
            for document in span["documents"]:
                del document["documentIndex"]
            span["documents"].sort(key=str)
    assert ours == expected


# --- Documents that are found ------------------------------------------------------------------------


def test_metadata_distinguishes_equal_documents(tmp_path: Path) -> None:
    texts = ["one", "same text", "two", "same text", "same text"]
    whole = build_index(tmp_path, texts, name="whole")
    own = whole.engine.tokenizer
    for number in (1, 3, 4):
        line = {"path": "whole.jsonl", "linenum": number, "metadata": {"number": number}}
        write_index(tmp_path / f"gone{number}", [[Text(own.encode("same text"), line)]], own)
        engine = open_engine(
            replace(whole.declaration, removed_paths=(tmp_path / f"gone{number}",))
        )
        assert engine.count(own.encode("same")).count == 2
        blocked = [n for n in range(5) if engine.document_by_index(n, 0).blocked]
        assert blocked == [number]
    other = {"of": "another indexer"}
    write_index(tmp_path / "other", [[Text(own.encode("same text"), other)] * 2], own)
    both = open_engine(replace(whole.declaration, removed_paths=(tmp_path / "other",)))
    assert both.count(own.encode("same")).count == 1
    assert sum(both.document_by_index(n, 0).blocked for n in range(5)) == 2


@pytest.mark.parametrize("gone", [["same text of no document"], ["the last", "the last"], ["the"]])
def test_documents_that_are_not_in_the_index_are_refused(tmp_path: Path, gone: list[str]) -> None:
    whole = build_index(tmp_path, ["first", "same text", "the last"], name="whole")
    removed = build_index(tmp_path, gone, name="gone")
    declaration = replace(whole.declaration, removed_paths=(removed.declaration.path,))
    with pytest.raises(ManifestError, match=r"gone: a removed document is \d times"):
        open_engine(declaration)


def test_the_last_document_of_a_shard(tmp_path: Path) -> None:
    whole = build_index(tmp_path, ["first", "the last"], name="whole")
    removed = build_index(tmp_path, ["the last"], name="gone")
    engine = open_engine(replace(whole.declaration, removed_paths=(removed.declaration.path,)))
    assert engine.count(engine.tokenizer.encode("t")).count == 1
    assert engine.document_by_index(1, 9).blocked


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    whole = build_index(tmp_path, ["first"], str(DEMO_TOKENIZER), "whole")
    removed = build_index(tmp_path, ["first"], BYTES, "gone")
    declaration = replace(whole.declaration, removed_paths=(removed.declaration.path,))
    with pytest.raises(ManifestError, match=r"gone does not fit .*whole: its token_dtype is u8"):
        open_engine(declaration)
