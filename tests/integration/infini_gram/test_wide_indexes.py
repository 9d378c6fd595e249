"""Indexes of four bytes a token, and of several directories: every answer is that of plain reading."""

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import EngineInputError
from app.infini_gram.attribution import AttributionParameters, attribute
from app.infini_gram.build_options import BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import Declaration
from app.infini_gram.engine import Engine
from app.infini_gram.indexes import Indexes
from app.infini_gram.manifest import ManifestError
from app.infini_gram.tokenizer import open_tokenizer
from tests import brute_attribution
from tests.brute_attribution import Corpus
from tests.index_files import Shard, Text, shard_of, write_index
from tests.indexes import DEMO_TOKENIZER, build_index, some_texts, wide_tokenizer

WIDTHS = {"u16": 2, "u32": 4}
# Shards of each directory: twelve, so that the names 10 and 11 sort before 2.
LAYOUTS = {"one": (3,), "several": (1, 12, 2)}
WANTED = {
    "allowSpansWithPartialWords": True, "minimumSpanLength": 2, "maximumFrequency": 40,
    "maximumSpanDensity": 1.0, "spanRankingMethod": "unigram_logprob_sum",
    "maximumDocumentsPerSpan": 4, "maximumContextLength": 9, "maximumContextLengthLong": 5,
    "maximumContextLengthSnippet": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=WIDTHS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "u16":
        return DEMO_TOKENIZER
    return wide_tokenizer(tmp_path_factory.mktemp("wide") / "tokenizer.json")


@pytest.fixture(scope="module", params=LAYOUTS)
def opened(
    request: pytest.FixtureRequest, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Engine, Corpus]:
    """An engine, and its corpus in the engine's order."""
    directory = tmp_path_factory.mktemp("index")
    own = open_tokenizer(str(tokenizer))
    texts = some_texts()
    paths: list[Path] = []
    ordered: list[Shard] = []
    for number, shards in enumerate(LAYOUTS[request.param]):
        paths.append(directory / str(number))
        share = texts[number :: len(LAYOUTS[request.param])]
        made = [shard_of(own, share[shard::shards], f"{number}.{shard}") for shard in range(shards)]
        write_index(paths[-1], made, own)
        ordered += [made[shard] for shard in sorted(range(shards), key=str)]
    declaration = Declaration("corpus", paths[0], str(tokenizer), more_paths=tuple(paths[1:]))
    engine = Engine(declaration)
    return engine, Corpus(ordered, WIDTHS[engine.token_dtype])


def _needles(corpus: Corpus, count: int, engine: Engine) -> list[list[int]]:
    chooser = random.Random(3)  # noqa: S311 # no secret
    texts = [text.ids for shard in corpus.shards for text in shard if any(text.ids)]
    found = []
    for number in range(count):
        ids = chooser.choice(texts)
        start = chooser.randrange(len(ids))
        needle = ids[start : start + chooser.randrange(1, 7)]
        found.append([*needle, chooser.randrange(engine.vocab_size)] if number % 3 == 1 else needle)
    return found


def _follows(corpus: Corpus, needle: list[int], end_id: int) -> Counter[int]:
    follows: Counter[int] = Counter()
    for shard in corpus.shards:
        for text in shard:
            ids = [*text.ids, end_id]
            follows.update(
                ids[start + len(needle)]
                for start in range(len(text.ids) - len(needle) + 1)
                if ids[start : start + len(needle)] == needle
            )
    return follows


def test_counts_finds_and_documents(opened: tuple[Engine, Corpus]) -> None:
    engine, corpus = opened
    assert engine.shard_count == len(corpus.shards)
    assert engine.total_documents == sum(map(len, corpus.shards))
    occurring = 0
    for needle in _needles(corpus, 150, engine):
        places = corpus.places(needle)
        occurring += bool(places)
        assert engine.count(needle).count == len(places)
        found = engine.find(needle)
        ranks = [
            (shard, rank)
            for shard, (start, end) in enumerate(found.segment_by_shard)
            for rank in range(start, end)
        ]
        assert len(ranks) == len(places)
        for (shard, rank), place in list(zip(ranks, places, strict=True))[:8]:
            assert place[0] == shard
            document = engine.document_by_rank(shard, rank, len(needle), 7)
            expected = corpus.document(place, len(needle), 7)
            assert document.token_ids == expected["tokenIds"]
            assert (document.index, document.needle_offset, document.metadata) == (
                expected["documentIndex"], expected["needleOffset"], expected["metadata"],
            )  # fmt: skip
            assert engine.document_by_pointer(*place, len(needle), 7) == document
    assert 60 < occurring < 150


def test_probabilities_and_next_tokens(opened: tuple[Engine, Corpus]) -> None:
    engine, corpus = opened
    for needle in _needles(corpus, 40, engine):
        follows = _follows(corpus, needle, engine.end_id)
        total = sum(follows.values())
        counted = engine.ntd(needle, 1_000_000)
        assert counted.prompt_count == total
        assert counted.by_token == {one: (n, n / total) for one, n in follows.items()}
        prob = engine.prob(needle)
        if len(needle) > 1 and prob.prompt_count:
            before = len(corpus.places(needle[:-1]))
            assert (prob.prompt_count, prob.continuation_count) == (before, total)
        assert engine.infgram_ntd(needle, 1_000_000).suffix_length >= bool(total)


def test_an_attribution_is_that_by_brute_force(opened: tuple[Engine, Corpus]) -> None:
    engine, corpus = opened
    text = "self return the index Grüße 東京 x1 ( ) only here: zyzzyva def self strange words"
    ours = attribute(engine, AttributionParameters.model_validate(WANTED), text)
    ids, offsets = engine.tokenizer.encode_with_offsets(text)
    expected: dict[str, Any] = brute_attribution.attribute(
        corpus, "corpus", ids, brute_attribution.cut_text(text, offsets), engine.tokenizer.decode,
        set(), set(), WANTED,
    )  # fmt: skip
    assert len(ours["spans"]) > 3
    for mine, plain in zip(ours["spans"], expected["spans"], strict=True):
        assert mine["unigramLogprobSum"] == pytest.approx(plain.pop("unigramLogprobSum"))
        del mine["unigramLogprobSum"]
    assert ours == expected


def test_every_rank_and_pointer_of_every_shard(opened: tuple[Engine, Corpus]) -> None:
    engine, corpus = opened
    width = WIDTHS[engine.token_dtype]
    for number, shard in enumerate(corpus.shards):
        tokens = sum(len(text.ids) + 1 for text in shard)
        refused = 0
        for place in range(0, tokens, 7):
            try:
                document = engine.document_by_rank(number, place, 1, 0)
            except EngineInputError:
                refused += 1
            else:
                assert len(document.token_ids) == 1
        with pytest.raises(EngineInputError, match="rank must be an integer"):
            engine.document_by_rank(number, tokens, 1, 0)
        with pytest.raises(EngineInputError, match=f"multiple of {width}"):
            engine.document_by_pointer(number, width + 1, 1, 0)
        assert refused <= len(shard)


def test_ids_beyond_the_vocabulary(opened: tuple[Engine, Corpus]) -> None:
    engine, _ = opened
    for one in (engine.vocab_size, 2**31, 2**32 - 1, 2**32, -1):
        with pytest.raises(EngineInputError, match="is not a token id"):
            engine.count([one])
    assert engine.count([engine.vocab_size - 1]).count == 0


# --- Builds ---------------------------------------------------------------------------------------


@pytest.mark.trial
def test_a_built_index_of_four_bytes(tmp_path: Path) -> None:
    """Counts and order of the suffixes, with ids whose halves look like separators."""
    tokenizer = wide_tokenizer(tmp_path / "tokenizer.json")
    texts = some_texts(documents=400)
    built = build_index(tmp_path, texts, str(tokenizer), "wide")
    engine = built.engine
    assert (engine.token_dtype, engine.shard_count) == ("u32", 1)
    assert engine.total_tokens == sum(len(ids) + 1 for ids in built.documents)
    used = {one for ids in built.documents for one in ids}
    assert min(used) > 65_535
    assert any(one & 0xFFFF == 0xFFFF for one in range(131_000, engine.vocab_size))
    shard = [Text(ids) for ids in built.documents]
    corpus = Corpus([shard], 4)
    for needle in _needles(corpus, 150, engine):
        places = corpus.places(needle)
        found = engine.find(needle)
        ((start, end),) = found.segment_by_shard
        assert [engine.shards[0].pointer(rank) for rank in range(start, end)] == [
            pointer for _, pointer in places
        ]
    assert not list((tmp_path / "wide").glob("build*"))


def test_ids_that_end_in_ffff_are_no_separators(tmp_path: Path) -> None:
    (letter,) = open_tokenizer(str(DEMO_TOKENIZER)).encode("I")
    tokenizer = wide_tokenizer(tmp_path / "tokenizer.json", first=131_071 - letter)
    built = build_index(tmp_path, ["I(I)I", "a(I b"], str(tokenizer), "wide")
    token = built.engine.tokenizer.encode("I")
    assert token == [131_071]
    assert built.engine.count(token).count == len(built.positions(token)) > 2


# --- Directories that do not fit -------------------------------------------------------------------


def test_directories_of_two_tokenizers_are_not_opened(tmp_path: Path) -> None:
    wide = wide_tokenizer(tmp_path / "tokenizer.json")
    one = build_index(tmp_path, ["a text"], str(DEMO_TOKENIZER), "one").declaration
    other = build_index(tmp_path, ["a text"], str(wide), "other").declaration
    both = Declaration("x", one.path, one.tokenizer, more_paths=(other.path,))
    with pytest.raises(ManifestError, match=r"other does not fit .*one: its token_dtype is u32"):
        Engine(both)


async def test_a_damaged_second_directory_closes_the_index(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    for name in ("a", "b"):
        build(BuildOptions(tmp_path / "a.txt", tmp_path / name, str(DEMO_TOKENIZER)))
    declared = Declaration("x", tmp_path / "a", str(DEMO_TOKENIZER), more_paths=(tmp_path / "b",))
    async with Indexes([declared]) as indexes:
        assert await indexes.run("x", lambda engine: engine.total_documents) == 2
    versions = {Engine(declared).version, Engine(Declaration("x", *_first(declared))).version}
    assert len(versions) == 2
    file = tmp_path / "b" / "metadata.0"
    file.write_bytes(file.read_bytes().replace(b"path", b"PATH"))
    async with Indexes([declared]) as indexes:
        assert "metadata.0 was altered" in indexes.failures["x"]
        assert str(tmp_path) not in indexes.failures["x"]
    shutil.rmtree(tmp_path / "b")
    async with Indexes([declared]) as indexes:
        assert "is not a directory" in indexes.failures["x"]


def _first(declared: Declaration) -> tuple[Path, str]:
    return declared.path, declared.tokenizer
