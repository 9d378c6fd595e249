"""`python -m app index`: what it builds, what it refuses, and what it leaves."""

import bz2
import contextlib
import gzip
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import orjson
import pytest

from app.cli.main import main
from app.infini_gram import builder, suffix_array
from app.infini_gram.build_options import BuildError, BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import BYTES, Declaration, read_declarations
from app.infini_gram.engine import Engine
from app.infini_gram.manifest import verify
from app.infini_gram.tokenizer import open_tokenizer
from tests.conftest import ROOT
from tests.index_files import Text, write_index
from tests.indexes import DEMO_TOKENIZER, some_texts, wide_tokenizer

pytestmark = pytest.mark.timeout(300)


def environment(tmp_path: Path) -> dict[str, str]:
    return os.environ | {
        "LLM_INDEXES_FILE": str(tmp_path / "indexes.toml"),
        "LLM_MODEL_REPOSITORY": str(ROOT / "models"),
    }


@dataclass
class Done:
    """The status and the output of a command."""

    returncode: int
    stdout: str
    stderr: str


def index(tmp_path: Path, *arguments: str | Path, **more: str) -> Done:
    """One command, in this process: starting another takes longer than most of them."""
    with (
        mock.patch.dict(os.environ, environment(tmp_path) | more),
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            status = main(["index", *map(str, arguments)])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return Done(status, output.getvalue(), errors.getvalue())


def built(tmp_path: Path, corpus: Path, *more: str, name: str = "small") -> Engine:
    """An index that the command built and declared, opened as it is declared."""
    out = tmp_path / "indexes"
    done = index(tmp_path, "build", corpus, "--name", name, "--out", out, *more)
    assert done.returncode == 0, done.stderr
    assert "Declared in" in done.stdout
    (found,) = [one for one in read_declarations(tmp_path / "indexes.toml") if one.name == name]
    verify(found.path)
    assert sorted(one.name for one in out.iterdir() if one.name.startswith(".")) == []
    return Engine(found)


def texts_of(engine: Engine) -> list[str]:
    return [
        engine.tokenizer.decode(engine.document_by_index(number, 1_000_000).token_ids)
        for number in range(engine.total_documents)
    ]


def lines(*rows: object) -> bytes:
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


# --- Builds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [(), ("--model", "demo"), ("--tokenizer", str(DEMO_TOKENIZER))])
def test_lines_of_json_are_built(tmp_path: Path, how: tuple[str, ...]) -> None:
    texts = some_texts()
    rows = [{"text": text, "url": f"u{number}"} for number, text in enumerate(texts)]
    (tmp_path / "news.jsonl").write_bytes(lines(*rows))
    engine = built(tmp_path, tmp_path / "news.jsonl", *how, "--description", 'Some "news"\\')
    assert texts_of(engine) == texts
    assert engine.declaration.description == 'Some "news"\\'
    assert engine.document_by_index(3, 10).metadata == {
        "path": "news.jsonl",
        "linenum": 3,
        "metadata": {"url": "u3"},
    }
    assert engine.tokenizer.dtype == ("u16" if how else "u8")
    if how:
        # The index needs nothing outside itself.
        assert engine.declaration.tokenizer == str(engine.declaration.path / "tokenizer.json")


def test_a_directory_of_all_forms(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus with spaces; $(false) 'quoted'"
    (corpus / "deep").mkdir(parents=True)
    (corpus / "a.jsonl.gz").write_bytes(gzip.compress(lines({"text": "from a"})))
    (corpus / "b.txt.bz2").write_bytes(bz2.compress(b"from b\n\nand more of b\n"))
    (corpus / "deep" / "c.txt").write_text("from c: Grüße 🙂")
    whole = built(tmp_path, corpus)
    assert texts_of(whole) == ["from a", "from b\n\nand more of b\n", "from c: Grüße 🙂"]
    paths = [whole.document_by_index(number, 0).metadata["path"] for number in range(3)]
    assert paths == ["a.jsonl.gz", "b.txt.bz2", "deep/c.txt"]
    blocks = built(tmp_path, corpus, "--split", "blocks", name="blocks")
    assert texts_of(blocks) == ["from a", "from b", "and more of b", "from c: Grüße 🙂"]


def test_the_smallest_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    for name, how in (("bytes", ()), ("demo", ("--model", "demo"))):
        engine = built(tmp_path, tmp_path / "a.txt", *how, name=name)
        assert engine.total_tokens == 2
        assert engine.count(engine.tokenizer.encode("a")).count == 1
    done = index(tmp_path, "list")
    assert re.search(r"^bytes +1 +2 +0\.0 MB +bytes +ok$", done.stdout, re.MULTILINE)


def test_an_awkward_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The indexer runs a shell with its paths in it, and the engine looks for words in them."""
    (tmp_path / "a.jsonl").write_bytes(lines({"text": "here it is"}))
    out = tmp_path / "a table; of 'tokenized' $(metadata) offset"
    awkward = tmp_path / "temporary files"
    awkward.mkdir()
    options = ("build", tmp_path / "a.jsonl", "--name", "small", "--out", out)
    monkeypatch.setattr(tempfile, "tempdir", str(awkward))
    done = index(tmp_path, *options)
    assert done.returncode == 0, done.stderr
    assert Engine(Declaration("small", out / "small", BYTES)).count(list(b"it is")).count == 1
    assert list(awkward.iterdir()) == []


def test_unigrams_are_counted(tmp_path: Path) -> None:
    """The engine takes them from the file as they are: they weigh attributed spans."""
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": text} for text in some_texts())))
    for name, how in (("bytes", ()), ("demo", ("--model", "demo"))):
        engine = built(tmp_path, tmp_path / "a.jsonl", *how, name=name)
        counts: Counter[int] = Counter()
        for number in range(engine.total_documents):
            counts.update(engine.document_by_index(number, 1_000_000).token_ids)
        assert engine.total_tokens == sum(counts.values()) + engine.total_documents
        rows = (engine.declaration.path / "unigram.0").read_text().splitlines()
        if how:
            reported = {int(key): int(value) for key, value in (row.split() for row in rows)}
            assert reported == counts | {65535: engine.total_documents}
        else:
            assert {n: int(row) for n, row in enumerate(rows) if row != "0"} == counts | {
                255: engine.total_documents
            }


@pytest.mark.trial
def test_several_parts_on_several_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a large corpus is indexed: 8 parts are merged to one array."""
    texts = some_texts(documents=6000)
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": text} for text in texts)))
    monkeypatch.setattr(suffix_array, "_SINGLE_CPU_BYTES", 0)
    steps: list[str] = []
    options = BuildOptions(tmp_path / "a.jsonl", tmp_path / "a", str(DEMO_TOKENIZER), cpus=8)
    build(options, lambda step, _share, _detail: steps.append(step))
    assert {"tokens", "suffix array, make-part", "checksums"} <= set(steps)
    engine = Engine(Declaration("a", tmp_path / "a", str(DEMO_TOKENIZER)))
    for word in ("self", " return", "東京", "zyzzyva"):
        ids = engine.tokenizer.encode(word)
        encoded = (engine.tokenizer.encode(text) for text in texts)
        expected = sum(
            found[start : start + len(ids)] == ids
            for found in encoded
            for start in range(len(found))
        )
        assert engine.count(ids).count == expected


def test_check_and_list(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text\n" * 100)
    engine = built(tmp_path, tmp_path / "a.txt")
    done = index(tmp_path, "check", "small")
    assert (done.returncode, done.stdout) == (
        0,
        "small is unchanged: 1 documents, 1,001 tokens, 0.0 MB\n",
    )
    assert "ok" in index(tmp_path, "list").stdout
    # The same size and time: only reading shows it.
    table = engine.declaration.path / "table.0"
    status, content = table.stat(), table.read_bytes()
    table.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(table, ns=(status.st_atime_ns, status.st_mtime_ns))
    done = index(tmp_path, "check", "small")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"{table} was altered" in done.stderr
    table.unlink()
    assert f"{table} is missing" in index(tmp_path, "list").stdout
    done = index(tmp_path, "check", "large")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "declares no index 'large'; there are: small" in done.stderr


def test_an_index_is_replaced_on_request(tmp_path: Path) -> None:
    corpus = tmp_path / "a.txt"
    corpus.write_text("old")
    old = built(tmp_path, corpus)
    corpus.write_text("new")
    done = index(tmp_path, "build", corpus, "--name", "small", "--out", tmp_path / "indexes")
    assert done.returncode == 2
    assert "declares an index 'small' already" in done.stderr
    done = index(
        tmp_path,
        "build",
        corpus,
        "--name",
        "small",
        "--out",
        tmp_path / "indexes",
        LLM_INDEXES_FILE="",
    )
    assert done.returncode == 2
    assert "exists already" in done.stderr
    assert texts_of(old) == ["old"]
    arguments = ("--name", "small", "--out", tmp_path / "indexes", "--replace")
    assert index(tmp_path, "build", corpus, *arguments).returncode == 0
    assert texts_of(Engine(old.declaration)) == ["new"]
    assert texts_of(old) == ["old"]  # who has it open keeps it
    assert len(read_declarations(tmp_path / "indexes.toml")) == 1
    elsewhere = ("--name", "small", "--out", tmp_path / "other", "--replace")
    done = index(tmp_path, "build", corpus, *elsewhere)
    assert done.returncode == 2
    assert "declares 'small' elsewhere" in done.stderr


def test_without_a_file_the_lines_are_shown(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    options = ("build", tmp_path / "a.txt", "--name", "small", "--out", tmp_path / "out")
    done = index(tmp_path, *options, LLM_INDEXES_FILE="")
    assert done.returncode == 0
    shown = done.stdout.partition("\n\n")[2]
    (tmp_path / "mine.toml").write_text(shown)
    (found,) = read_declarations(tmp_path / "mine.toml")
    assert Engine(found).total_documents == 1
    done = index(tmp_path, "list", "--file", tmp_path / "mine.toml")
    assert "small" in done.stdout


# --- An index of others --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[BYTES, str(DEMO_TOKENIZER)], ids=["bytes", "demo"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index without what only we put there."""
    place = tmp_path_factory.mktemp("original")
    (place / "a.jsonl").write_bytes(lines(*({"text": text} for text in some_texts())))
    build(BuildOptions(place / "a.jsonl", place / request.param.rpartition("/")[2], request.param))
    (directory,) = (one for one in place.iterdir() if one.is_dir())
    (directory / "manifest.json").unlink()
    (directory / "tokenizer.json").unlink(missing_ok=True)
    return directory


@pytest.fixture
def foreign(original: Path, tmp_path: Path) -> tuple[Path, tuple[str, ...]]:
    """A copy of it, and how its tokenizer is named."""
    directory = shutil.copytree(original, tmp_path / "foreign")
    return directory, () if original.name == BYTES else ("--tokenizer", str(DEMO_TOKENIZER))


@pytest.mark.parametrize("without", [(), ("unigram",), ("unigram", "metadata", "metaoff")])
def test_an_index_of_others_is_adopted(
    tmp_path: Path, foreign: tuple[Path, tuple[str, ...]], without: tuple[str, ...]
) -> None:
    directory, how = foreign
    for kind in without:
        (directory / f"{kind}.0").unlink()
    done = index(tmp_path, "adopt", directory, "--name", "theirs", *how)
    assert done.returncode == 0, done.stderr
    assert index(tmp_path, "check", "theirs").returncode == 0
    (found,) = read_declarations(tmp_path / "indexes.toml")
    engine = Engine(found)
    assert texts_of(engine) == some_texts()
    metadata = engine.document_by_index(5, 1).metadata
    assert metadata == (
        {} if "metadata" in without else {"path": "a.jsonl", "linenum": 5, "metadata": {}}
    )
    ids = engine.tokenizer.encode("only here: zyzzyva")
    (whole,) = engine.attribute(ids, [], 1, 10, allow_partial_words=True)
    assert (
        -200 < whole.unigram_logprob_sum < -10
    )  # counted by the engine, if the declaration did not
    done = index(tmp_path, "adopt", directory, "--name", "again", *how)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "needs no adoption" in done.stderr


def cross(directory: Path) -> None:
    """The suffix array in reverse (a pointer of these small ones has two bytes)."""
    entries = array("H", (directory / "table.0").read_bytes())
    entries.reverse()
    (directory / "table.0").write_bytes(entries.tobytes())


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: (d / "offset.0").unlink(), "is no index of"),
        (lambda d: (d / "metaoff.0").unlink(), "is no index of"),
        (lambda d: os.truncate(d / "table.0", 1001), "is no index of"),
        (lambda d: os.truncate(d / "offset.0", 81), "is no index of"),
        (lambda d: (d / "tokenized.0").unlink(), "holds no index"),
        (lambda d: (d / "tokenized.0").rename(d / "tokenized.1"), "is no index of"),
        (cross, "does not sort the tokens"),
        (lambda d: (d / "unigram.0").write_text("1 2\n"), "unigram.0 "),
        (lambda d: (d / "unigram.0").write_text("many\n"), "is no list of counts"),
        (lambda d: (d / "unigram.0").write_text("7\n"), "counts other tokens"),
    ],
)
def test_what_is_no_index_is_not_adopted(
    tmp_path: Path,
    foreign: tuple[Path, tuple[str, ...]],
    damage: Callable[[Path], object],
    problem: str,
) -> None:
    directory, how = foreign
    damage(directory)
    done = index(tmp_path, "adopt", directory, "--name", "theirs", *how)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert problem in done.stderr
    assert not (directory / "manifest.json").exists()
    assert not (tmp_path / "indexes.toml").exists()


@pytest.mark.trial
def test_an_index_of_four_bytes_and_two_directories_is_adopted(tmp_path: Path) -> None:
    """The sizes show the width; a directory with a manifest is taken as it is."""
    wide = wide_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.jsonl").write_bytes(lines(*({"text": text} for text in some_texts())))
    directories = [tmp_path / name for name in ("first", "second")]
    for directory in directories:
        build(BuildOptions(tmp_path / "a.jsonl", directory, str(wide)))
        (directory / "manifest.json").unlink()
    how = ("--tokenizer", str(wide))
    done = index(tmp_path, "adopt", directories[0], "--name", "one", *how)
    assert done.returncode == 0, done.stderr
    done = index(tmp_path, "adopt", *directories, "--name", "both", *how)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("240 documents, ")
    assert index(tmp_path, "check", "both").returncode == 0
    assert re.search(r"^both +240 ", index(tmp_path, "list").stdout, re.MULTILINE)
    one, both = read_declarations(tmp_path / "indexes.toml")
    assert both.paths == tuple(directories)
    engine = Engine(both)
    assert (engine.token_dtype, engine.shard_count) == ("u32", 2)
    ids = engine.tokenizer.encode("only here: zyzzyva")
    assert engine.count(ids).count == 2 * Engine(one).count(ids).count > 0
    (whole,) = engine.attribute(ids, [], 1, 10, allow_partial_words=True)
    assert -200 < whole.unigram_logprob_sum < -10


def test_four_bytes_of_a_tokenizer_with_small_ids(tmp_path: Path) -> None:
    """Other indexers choose the width themselves."""
    tokenizer = open_tokenizer(str(DEMO_TOKENIZER))
    tokenizer.dtype = "u32"
    shard = [Text(tokenizer.encode(text)) for text in some_texts()]
    write_index(tmp_path / "theirs", [shard], tokenizer)
    (tmp_path / "theirs" / "manifest.json").unlink()
    how = ("--name", "theirs", "--model", "demo")
    done = index(tmp_path, "adopt", tmp_path / "theirs", *how)
    assert done.returncode == 0, done.stderr
    (found,) = read_declarations(tmp_path / "indexes.toml")
    engine = Engine(found)
    assert engine.token_dtype == "u32"
    assert engine.count(engine.tokenizer.encode("only here: zyzzyva")).count == 1


def test_a_width_that_the_tokenizer_cannot_have(tmp_path: Path) -> None:
    wide = wide_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("some text, and some more of it")
    for name, its, other in (("short", DEMO_TOKENIZER, wide), ("wide", wide, DEMO_TOKENIZER)):
        directory = tmp_path / name
        build(BuildOptions(tmp_path / "a.txt", directory, str(its)))
        (directory / "manifest.json").unlink()
        arguments = (directory, "--name", name, "--tokenizer", str(other))
        done = index(tmp_path, "adopt", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
        problem = "two bytes a token" if name == "short" else "which the tokenizer does not know"
        assert problem in done.stderr
        assert not (directory / "manifest.json").exists()


def test_another_tokenizer_is_noticed(
    tmp_path: Path, foreign: tuple[Path, tuple[str, ...]]
) -> None:
    directory, how = foreign
    other = ("--model", "demo") if not how else ()
    done = index(tmp_path, "adopt", directory, "--name", "theirs", *other)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done
    assert not (directory / "manifest.json").exists()


def test_a_file_that_cannot_be_written_costs_no_index(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    options = ("build", tmp_path / "a.txt", "--name", "small", "--out", tmp_path / "out")
    done = index(tmp_path, *options, LLM_INDEXES_FILE=str(tmp_path / "a.txt" / "indexes.toml"))
    assert done.returncode == 1
    assert "The index is built, and not declared: " in done.stderr
    assert '[indexes."small"]' in done.stdout
    verify(tmp_path / "out" / "small")


# --- Refusals ------------------------------------------------------------------------------------


def refused(tmp_path: Path, corpus: Path, *more: str | Path, name: str = "small") -> str:
    """The one output line of a build that ends with status 2 and leaves nothing."""
    out = tmp_path / "out"
    done = index(tmp_path, "build", corpus, "--name", name, "--out", out, *more)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert not out.exists() or list(out.iterdir()) == []
    assert not (tmp_path / "indexes.toml").exists()
    return done.stderr


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", b"", "The corpus is empty"),
        ("a.txt", b" \n\n", "The corpus is empty"),
        ("a.jsonl", b'\n{"text": ""}\n', "The corpus is empty"),
        ("a.txt", b"fine\nnot \xff", "a.txt, line 2: it is not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2: invalid JSON: "),
        ("a.jsonl", b'{"text": "a"}\n{"words": "b"}\n', "a.jsonl, line 2: it has no text"),
        # mtime=0: all processes that share the tests must give it the same name.
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}' * 99, mtime=0)[:30], "a.jsonl.gz is damaged"),
        ("a.jsonl.zst", b"", "decompress it (zstd -d)"),
        ("a.pdf", b"", "is neither .txt nor .jsonl"),
    ],
)
def test_corpora_that_are_wrong(tmp_path: Path, name: str, content: bytes, problem: str) -> None:
    (tmp_path / name).write_bytes(content)
    assert problem in refused(tmp_path, tmp_path / name)


def test_what_else_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "none").mkdir()
    (tmp_path / "file").write_text("")
    good = tmp_path / "a.txt"
    assert "gone.txt does not exist" in refused(tmp_path, tmp_path / "gone.txt")
    assert "holds no .txt, .jsonl or .ndjson file" in refused(tmp_path, tmp_path / "none")
    assert "no model 'gone'" in refused(tmp_path, good, "--model", "gone")
    assert "gone.json cannot be read" in refused(tmp_path, good, "--tokenizer", "gone.json")
    assert "is no tokenizer.json" in refused(tmp_path, good, "--tokenizer", good)
    assert "no token 60000" in refused(tmp_path, good, "--model", "demo", "--end-id", "60000")
    assert "Not a directory" in refused(tmp_path, good, "--out", tmp_path / "file" / "x")
    assert "No such file" in refused(tmp_path, good, "--out", "/proc/nowhere")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--name", "../up"), ("--name", "v1"), ("--name", ""), (), ("--name", "a", "--cpus", "0"),
        ("--name", "a", "--memory", "lots"), ("--name", "a", "--split", "words"),
        ("--name", "a", "--model", "demo", "--tokenizer", "bytes"), ("--name", "a", "--end-id", "-1"),
    ],
)  # fmt: skip
def test_arguments_that_are_wrong(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "a.txt").write_text("text")
    done = index(tmp_path, "build", tmp_path / "a.txt", "--out", tmp_path / "out", *arguments)
    assert done.returncode == 2
    assert "usage:" in done.stderr
    assert not (tmp_path / "out").exists()


def test_room_is_asked_for_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"0123456789" * 1_000_000)
    options = BuildOptions(tmp_path / "a.txt", tmp_path / "a")
    monkeypatch.setattr(builder, "available_memory", lambda: 400_000_000)
    with pytest.raises(BuildError, match=r"Too little memory: about 420 MB needed, 400 MB"):
        build(options)
    monkeypatch.undo()
    little = SimpleNamespace(free=80_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: little)
    with pytest.raises(BuildError, match=r"Too little space in .*: about 90 MB needed for 10,0"):
        build(options)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.txt"]


def test_a_machine_without_the_package_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "find_spec", lambda _: None)
    with pytest.raises(BuildError, match="infini-gram is not installed"):
        build(BuildOptions(tmp_path, tmp_path / "a"))


def test_an_indexer_that_fails_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    options = BuildOptions(tmp_path / "a.txt", tmp_path / "a", open_files=2**40)
    with pytest.raises(BuildError, match=r"The indexer failed \(status 1\): .*"):
        build(options)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.txt"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["tokenized.0", "build.log"])
@pytest.mark.trial
def test_nothing_is_left_of_an_interrupted_build(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    (tmp_path / "a.txt").write_bytes(os.urandom(6_000_000).hex().encode())
    out = tmp_path / "out"
    options = ["build", str(tmp_path / "a.txt"), "--name", "small", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "app", "index", *options],
        cwd=ROOT, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not (found := list(out.glob(f".small.building-*/new/{moment}"))):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    working = found[0].parent
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"Interrupted: no files are left." in errors
    assert output == b""
    assert list(out.iterdir()) == []
    assert not (tmp_path / "indexes.toml").exists()
    # Nor of the indexer, whose commands name their directory.
    for command in Path("/proc").glob("[0-9]*/cwd"):
        try:
            assert not command.readlink().is_relative_to(working)
        except OSError:
            continue


def test_what_a_killed_build_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = tmp_path / "indexes" / f".small.building-{ended.pid}"
    left.mkdir(parents=True)
    (left / "tokenized.0").write_text("half")
    running = tmp_path / "indexes" / f".other.building-{os.getpid()}"
    running.mkdir()
    out = ("--out", tmp_path / "indexes")
    assert index(tmp_path, "build", tmp_path / "a.txt", "--name", "small", *out).returncode == 0
    assert not left.exists()
    assert running.exists()


def test_help_of_index_teaches(tmp_path: Path) -> None:
    text = index(tmp_path, "--help").stdout
    assert "index build news/ --name news --model demo" in text
    text = index(tmp_path, "build", "--help").stdout
    for word in ("--split", "--memory", '{"text": "..."', "four bytes", "Status 2"):
        assert word in text
