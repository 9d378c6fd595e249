"""The engine against a straightforward reading of the same texts, and against hostile values."""

import math
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from infini_gram.engine import InfiniGramEngine

from app.core.errors import EngineInputError
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.engine import Engine
from app.infini_gram.manifest import KINDS, ManifestError, verify
from tests.conftest import ROOT
from tests.indexes import DEMO_TOKENIZER, TOKENIZERS, BuiltIndex, build_index, some_texts


# The engine takes a file for a suffix array where its path has "table", and so on.
@pytest.fixture(scope="module", params=TOKENIZERS, ids=["bytes", "demo"])
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BuiltIndex:
    directory = tmp_path_factory.mktemp("time table's metadata; tokenized")
    return build_index(directory, some_texts(), request.param)


def needles(index: BuiltIndex, count: int, seed: int) -> Iterator[list[int]]:
    """Some that occur, some that do not, and some of both beginnings."""
    chooser = random.Random(seed)  # noqa: S311 # no secret
    for number in range(count):
        ids = chooser.choice(index.documents)
        start = chooser.randrange(len(ids))
        needle = ids[start : start + chooser.randrange(1, 9)]
        if number % 3 == 1:
            needle = [*needle, chooser.randrange(index.engine.vocab_size)]
        elif number % 3 == 2:
            needle = [chooser.choice(needle) for _ in needle]
        yield needle


def test_what_it_is(index: BuiltIndex) -> None:
    engine = index.engine
    assert engine.total_documents == len(index.documents)
    assert engine.total_tokens == sum(len(ids) + 1 for ids in index.documents)
    assert engine.shard_count == 1
    assert engine.vocab_size == engine.tokenizer.vocab_size


@pytest.mark.trial
def test_300_counts_and_finds_are_those_of_reading(index: BuiltIndex) -> None:
    found_any = 0
    for needle in needles(index, 300, seed=1):
        expected = index.positions(needle)
        assert index.engine.count(needle).count == len(expected)
        found = index.engine.find(needle)
        assert found.count == len(expected)
        found_any += bool(expected)
        ((start, end),) = found.segment_by_shard
        assert end - start == found.count
        places = []
        for rank in range(start, min(end, start + 20)):
            document = index.engine.document_by_rank(0, rank, len(needle), 1_000_000)
            assert document.token_ids == index.documents[document.index]
            assert document.metadata["metadata"] == {"number": document.index}
            places.append((document.index, document.needle_offset))
        assert set(places) <= set(expected)
        assert len(set(places)) == min(found.count, 20)
    assert 100 < found_any < 300


@pytest.mark.trial
def test_probabilities_are_those_of_reading(index: BuiltIndex) -> None:
    for needle in needles(index, 100, seed=2):
        *prompt, last = needle
        before = len(index.positions(prompt)) if prompt else index.engine.total_tokens
        prob = index.engine.prob(needle)
        assert prob.prompt_count == before
        assert prob.continuation_count == (len(index.positions(needle)) if before else 0)
        assert prob.prob == (prob.continuation_count / before if before else -1)

        suffix = next(
            prompt[start:]
            for start in range(len(prompt) + 1)
            if start == len(prompt) or index.positions(prompt[start:])
        )
        infgram = index.engine.infgram_prob(needle)
        assert infgram.suffix_length == len(suffix)
        assert infgram.continuation_count == len(index.positions([*suffix, last]))


def test_distributions_are_those_of_reading(index: BuiltIndex) -> None:
    for needle in needles(index, 60, seed=3):
        follows: Counter[int] = Counter()
        for number, start in index.positions(needle):
            ids = [*index.documents[number], index.engine.end_id]
            follows[ids[start + len(needle)]] += 1
        counted = index.engine.ntd(needle, 1_000_000)
        total = sum(follows.values())
        assert (counted.prompt_count, counted.approx) == (total, False)
        assert counted.by_token == {one: (n, n / total) for one, n in follows.items()}
        if total:
            infgram = index.engine.infgram_ntd(needle, 1_000_000)
            assert (infgram.by_token, infgram.suffix_length) == (counted.by_token, len(needle))


def test_ends_of_the_last_document_and_of_others_are_not_all_that_follows(tmp_path: Path) -> None:
    """They are the first and the last in the order of what follows: the package counts all as ends."""
    engine = build_index(tmp_path, ["a", "ab", "ac", "ad", "ae", "a"]).engine
    follows = {engine.end_id: 2} | dict.fromkeys(b"bcde", 1)
    for most in (1_000_000, 6):
        counted = engine.ntd(list(b"a"), most)
        assert {one: count for one, (count, _) in counted.by_token.items()} == follows


def test_clauses(index: BuiltIndex) -> None:
    encode = index.engine.tokenizer.encode
    rare, word = encode(" zyzzyva"), encode("only")
    found = index.engine.find_cnf([[rare], [word, encode("self")]], 500_000, 1000)
    assert (found.count, found.approx) == (1, False)
    (pointers,) = found.ptrs_by_shard
    document = index.engine.document_by_pointer(0, pointers[0], 1, 1_000_000)
    assert document.index == len(index.documents) - 1
    assert index.engine.count_cnf([[rare], [word]], 500_000, 1000).count == 1
    assert index.engine.count_cnf([[rare], [encode("東京"), encode("🙂")]], 500_000, 1).count == 0


def test_documents_by_number(index: BuiltIndex) -> None:
    for number, ids in enumerate(index.documents):
        document = index.engine.document_by_index(number, 10)
        assert (document.index, document.length) == (number, len(ids))
        assert document.token_ids == ids[:10]
        assert document.display_length == len(document.token_ids)
        assert document.metadata["linenum"] == number
        assert document.metadata["path"] == "small.jsonl"
        assert not document.blocked


def test_context_around_a_needle(index: BuiltIndex) -> None:
    needle = index.engine.tokenizer.encode(" zyzzyva")
    ((rank, _),) = index.engine.find(needle).segment_by_shard
    whole = index.documents[-1]
    place = len(whole) - len(needle)
    for context in (0, 1, 3, 10_000):
        document = index.engine.document_by_rank(0, rank, len(needle), context)
        start = max(0, place - context)
        assert document.token_ids == whole[start:]
        assert document.needle_offset == place - start
        assert document.length == len(whole)


def test_attribution_finds_the_longest_parts(index: BuiltIndex) -> None:
    strange = "zyzzyva only here"
    ids = index.engine.tokenizer.encode(f"{strange}: zyzzyva")
    spans = index.engine.attribute(ids, [], 1, 1_000_000, allow_partial_words=True)
    assert spans
    total = index.engine.total_tokens
    counts = Counter(one for document in index.documents for one in document)
    for span in spans:
        part = ids[span.left : span.right]
        assert (span.length, span.count) == (len(part), len(index.positions(part)))
        assert span.right == len(ids) or not index.positions(ids[span.left : span.right + 1])
        assert len(span.pointers) == span.count
        for shard, pointer in span.pointers:
            document = index.engine.document_by_pointer(shard, pointer, span.length, 0)
            assert document.token_ids == part
        logprobs = [math.log(counts[one] / total) for one in part]
        assert span.unigram_logprob_sum == pytest.approx(sum(logprobs), rel=1e-5)
    starts = index.engine.tokenizer.word_start_ids()
    whole = index.engine.attribute(ids, [], 1, 1_000_000, allow_partial_words=False)
    assert whole
    for span in whole:
        assert ids[span.left] in starts
        assert span.right == len(ids) or ids[span.right] in starts


def test_delimiters_and_frequency_bound_spans(index: BuiltIndex) -> None:
    ids = index.engine.tokenizer.encode("only here: zyzzyva")
    middle = ids[len(ids) // 2]
    divided = index.engine.attribute(ids, [middle], 1, 1_000_000, allow_partial_words=True)
    assert divided
    for span in divided:
        assert middle not in ids[span.left : span.right - 1]
    rare = index.engine.attribute(ids, [], 2, 1, allow_partial_words=True)
    assert rare
    for span in rare:
        assert span.count == 1
        assert span.length >= 2


# --- Values that it does not take ----------------------------------------------------------------


IDS: list[Any] = [[-1], [2**16], [2**70], [None], ["1"], [1.0], [True]]


@pytest.mark.parametrize("ids", IDS, ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda engine, ids: engine.find(ids),
        lambda engine, ids: engine.count(ids),
        lambda engine, ids: engine.prob(ids),
        lambda engine, ids: engine.prob([*ids, 1]),
        lambda engine, ids: engine.ntd(ids, 10),
        lambda engine, ids: engine.infgram_prob(ids),
        lambda engine, ids: engine.infgram_ntd(ids, 10),
        lambda engine, ids: engine.find_cnf([[ids]], 10, 10),
        lambda engine, ids: engine.count_cnf([[[1]], [[1], ids]], 10, 10),
        lambda engine, ids: engine.attribute(ids, [], 1, 1, True),
        lambda engine, ids: engine.attribute([1], ids, 1, 1, True),
    ],
)
def test_token_ids(index: BuiltIndex, call: Callable[[Engine, Any], object], ids: Any) -> None:
    with pytest.raises(EngineInputError, match="is not a token id of this index"):
        call(index.engine, ids)


NUMBERS: list[Any] = [-1, 2**63, 2**70, None, 1.0, True, "1"]


@pytest.mark.parametrize("number", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda engine, number: engine.ntd([1], number),
        lambda engine, number: engine.infgram_ntd([1], number),
        lambda engine, number: engine.find_cnf([[[1]]], number, 1),
        lambda engine, number: engine.find_cnf([[[1]]], 1, number),
        lambda engine, number: engine.document_by_rank(number, 0, 0, 0),
        lambda engine, number: engine.document_by_rank(0, number, 0, 0),
        lambda engine, number: engine.document_by_rank(0, 0, number, 0),
        lambda engine, number: engine.document_by_rank(0, 0, 0, number),
        lambda engine, number: engine.document_by_pointer(number, 2, 0, 0),
        lambda engine, number: engine.document_by_pointer(0, number, 0, 0),
        lambda engine, number: engine.document_by_pointer(0, 2, number, 0),
        lambda engine, number: engine.document_by_pointer(0, 2, 0, number),
        lambda engine, number: engine.document_by_index(number, 1),
        lambda engine, number: engine.document_by_index(0, number),
        lambda engine, number: engine.attribute([1], [], number, 1, True),
        lambda engine, number: engine.attribute([1], [], 1, number, True),
    ],
)
def test_numbers(index: BuiltIndex, call: Callable[[Engine, Any], object], number: Any) -> None:
    with pytest.raises(EngineInputError, match="must be an integer from"):
        call(index.engine, number)


def test_bounds_are_exact(index: BuiltIndex) -> None:
    engine = index.engine
    width = 1 if engine.declaration.tokenizer == BYTES else 2
    size = engine.total_tokens * width
    for call in (
        lambda: engine.document_by_rank(1, 0, 0, 0),
        lambda: engine.document_by_rank(0, engine.total_tokens, 0, 0),
        lambda: engine.document_by_pointer(0, size, 0, 0),
        lambda: engine.document_by_index(engine.total_documents, 1),
        lambda: engine.count([engine.vocab_size]),
        lambda: engine.ntd([1], 0),
        lambda: engine.prob([]),
        lambda: engine.find_cnf([], 1, 1),
        lambda: engine.find_cnf([[]], 1, 1),
        lambda: engine.find_cnf([[[1]], [[]]], 1, 1),
    ):
        with pytest.raises(EngineInputError):
            call()
    assert engine.document_by_index(engine.total_documents - 1, 0).token_ids == []
    assert engine.document_by_pointer(0, size - width, 1, 0).token_ids == index.documents[-1][-1:]
    last = [engine.vocab_size - 1]
    assert engine.count(last).count == len(index.positions(last))
    assert engine.find([]).count == engine.total_tokens


def test_every_rank_and_every_pointer(index: BuiltIndex) -> None:
    """All of them: a document's part, or refused where a separator stands."""
    engine = index.engine
    width = 1 if engine.declaration.tokenizer == BYTES else 2
    refused = 0
    for number in range(engine.total_tokens):
        for call, place in (
            (engine.document_by_rank, number),
            (engine.document_by_pointer, number * width),
        ):
            try:
                document = call(0, place, 1, 0)
            except EngineInputError:
                refused += 1
            else:
                assert len(document.token_ids) == document.display_length == 1
    with pytest.raises(EngineInputError, match="A document begins there"):
        engine.document_by_pointer(0, 0, 1, 0)
    assert refused == 2 * engine.total_documents
    if width == 2:
        with pytest.raises(EngineInputError, match="multiple of 2"):
            engine.document_by_pointer(0, 3, 1, 0)


def test_many_threads(index: BuiltIndex) -> None:
    asked = list(needles(index, 200, seed=5))
    expected = [index.engine.count(needle) for needle in asked]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(index.engine.count, asked * 3)) == expected * 3


def test_it_is_the_packages_answer(index: BuiltIndex) -> None:
    """Next to the package's own engine, opened as documented."""
    plain = index.declaration.path.parent / "plain"
    link = Path("/proc/self/fd") / str(index.engine._directories[0])
    assert not plain.exists()
    package = InfiniGramEngine(
        index_dir=str(link),
        eos_token_id=index.engine.end_id,
        vocab_size=index.engine.vocab_size,
        token_dtype=index.engine.token_dtype,
    )
    for needle in needles(index, 100, seed=6):
        found = index.engine.find(needle)
        assert package.find(needle) == {
            "cnt": found.count,
            "segment_by_shard": found.segment_by_shard,
        }
        counted = index.engine.infgram_ntd(needle, 50)
        answer: Any = package.infgram_ntd(needle, 50)
        assert answer["result_by_token_id"] == {
            one: {"cont_cnt": count, "prob": prob}
            for one, (count, prob) in counted.by_token.items()
        }
        assert (answer["prompt_cnt"], answer["suffix_len"]) == (
            counted.prompt_count,
            counted.suffix_length,
        )
        clauses = [[needle], [[needle[0]], [needle[-1]]]]
        both = index.engine.find_cnf(clauses, 100, 20)
        answer = package.find_cnf(clauses, 100, 20)
        assert (answer["cnt"], answer["approx"]) == (both.count, both.approx)
        assert answer["ptrs_by_shard"] == both.ptrs_by_shard


def test_shards(tmp_path: Path) -> None:
    """Two indexes put together as the two shards of one."""
    texts = some_texts()
    first = build_index(tmp_path, texts[:70], str(DEMO_TOKENIZER), "first")
    second = build_index(tmp_path, texts[70:], str(DEMO_TOKENIZER), "second")
    for kind in KINDS:
        file = second.declaration.path / f"{kind}.0"
        file.rename(first.declaration.path / f"{kind}.1")
    (one,), (other,) = first.engine.manifests, second.engine.manifests
    one.model_copy(
        update={
            "shards": 2,
            "tokens": one.tokens + other.tokens,
            "documents": len(texts),
            "files": one.files
            | {name.replace(".0", ".1"): entry for name, entry in other.files.items()},
        }
    ).write(first.declaration.path)
    verify(first.declaration.path)
    whole = BuiltIndex(
        first.declaration, Engine(first.declaration), first.documents + second.documents
    )
    engine = whole.engine
    assert (engine.shard_count, engine.total_documents) == (2, len(texts))
    in_both = 0
    for needle in needles(whole, 100, seed=8):
        expected = whole.positions(needle)
        found = engine.find(needle)
        assert found.count == len(expected)
        in_both += all(end > start for start, end in found.segment_by_shard)
        for shard, (start, end) in enumerate(found.segment_by_shard):
            for rank in range(start, min(end, start + 5)):
                document = engine.document_by_rank(shard, rank, len(needle), 1_000_000)
                assert (document.index, document.needle_offset) in expected
    assert in_both
    last = engine.document_by_index(len(texts) - 1, 1_000_000)
    assert last.token_ids == whole.documents[-1]
    ids = engine.tokenizer.encode("only here: zyzzyva self return")
    for span in engine.attribute(ids, [], 1, 1_000_000, allow_partial_words=True):
        assert span.count == len(span.pointers) == len(whole.positions(ids[span.left : span.right]))
        for shard, pointer in span.pointers:
            document = engine.document_by_pointer(shard, pointer, span.length, 0)
            assert document.token_ids == ids[span.left : span.right]
    with pytest.raises(EngineInputError, match="shard must be an integer from 0 to 1"):
        engine.document_by_pointer(2, 2, 1, 1)


def test_what_the_package_does_and_docs_tell(tmp_path: Path) -> None:
    """A new version that does it otherwise changes docs/infini_gram.md, too."""
    engine = build_index(tmp_path, ["bbc"], name="first").engine
    assert engine.count(list(b"b")).count == 2
    assert engine.attribute(list(b"bz"), [], 1, 10, True)
    # The match would be at the very first of all suffixes: it is not looked at.
    assert engine.attribute(list(b"ba"), [], 1, 10, True) == []

    engine = build_index(tmp_path, ["x one two x"] * 3, name="clauses").engine
    clauses = [[list(b"one")], [list(b"two")]]
    assert engine.count_cnf(clauses, 1000, 3).count == 0
    # Three documents hold both; the nearest on one side is another document's.
    assert engine.count_cnf(clauses, 1000, 1000).count == 1


def test_a_hostile_afternoon_leaves_the_process_alive(index: BuiltIndex) -> None:
    """In a process of its own, so that a crash is reported as one: a failure here killed it."""
    code = (
        "import random, sys; from app.core.errors import EngineInputError\n"
        "from pathlib import Path\n"
        "from app.infini_gram.engine import Engine, Declaration\n"
        "engine = Engine(Declaration('x', Path(sys.argv[1]), sys.argv[2]))\n"
        "r = random.Random(9); odd = [0, 1, 2, -1, 7, 2**15, 2**16-1, 2**31, 2**63, 2**64, None]\n"
        "n = lambda: r.choice(odd); some = lambda: [n() for _ in range(r.randrange(4))]\n"
        "calls = [lambda: engine.find(some()), lambda: engine.prob(some()),\n"
        "  lambda: engine.ntd(some(), n()), lambda: engine.infgram_ntd(some(), n()),\n"
        "  lambda: engine.find_cnf([[some()]], n(), n()),\n"
        "  lambda: engine.document_by_rank(n(), n(), n(), n()),\n"
        "  lambda: engine.document_by_pointer(n(), n(), n(), n()),\n"
        "  lambda: engine.document_by_index(n(), n()),\n"
        "  lambda: engine.attribute(some(), some(), n(), n(), r.random() < 0.5)]\n"
        "good = 0\n"
        "for _ in range(5000):\n"
        "    try: r.choice(calls)(); good += 1\n"
        "    except EngineInputError: pass\n"
        "assert 100 < good < 4900, good\n"
    )
    declared = index.declaration
    done = subprocess.run(
        [sys.executable, "-c", code, str(declared.path), declared.tokenizer],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_other_threads_go_on(index: BuiltIndex) -> None:
    """The interpreter's lock is free while the engine works."""
    ids = [one for document in index.documents for one in document][:3000]
    turns = 0
    ended = threading.Event()

    def work() -> None:
        index.engine.attribute(ids, [], 1, 1_000_000, True)
        ended.set()

    worker = threading.Thread(target=work)
    worker.start()
    while not ended.wait(0.001):
        turns += 1
    worker.join()
    assert turns > 5


def test_a_declaration_that_does_not_fit_is_not_opened(index: BuiltIndex) -> None:
    other = next(one for one in TOKENIZERS if one != index.declaration.tokenizer)
    with pytest.raises(
        ManifestError, match=r"was built (with a tokenizer|of bytes), and is declared"
    ):
        Engine(Declaration("x", index.declaration.path, other))
