"""The indexes of a process: a changed index is not opened, and the others are."""

import asyncio
import json
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.core.errors import IndexBusyError, IndexUnavailableError, UnknownIndexError
from app.core.settings import Settings
from app.infini_gram import engine_main, indexes as opened, manifest as manifests
from app.infini_gram.build_options import BuildOptions
from app.infini_gram.builder import build
from app.infini_gram.declarations import BYTES, Declaration, add_declaration, read_declarations
from app.infini_gram.engine import Engine
from app.infini_gram.indexes import Indexes
from app.infini_gram.manifest import KINDS, ManifestError, verify
from app.infini_gram.process import EngineProcess
from tests.conftest import run_service
from tests.indexes import DEMO_TOKENIZER, BuiltIndex, build_index, some_texts
from tests.integration.support import until


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltIndex:
    return build_index(tmp_path_factory.mktemp("built"), some_texts(), str(DEMO_TOKENIZER))


@pytest.fixture
def copy(built: BuiltIndex, tmp_path: Path) -> Declaration:
    """One to damage."""
    shutil.copytree(built.declaration.path, tmp_path / "copy")
    tokenizer = str(tmp_path / "copy" / "tokenizer.json")
    return Declaration("copy", tmp_path / "copy", tokenizer)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0\0")


def alter(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def empty(file: Path) -> None:
    file.write_bytes(b"")


def to_directory(file: Path) -> None:
    size = file.stat().st_size
    file.unlink()
    file.mkdir()
    assert size


DAMAGES = [Path.unlink, cut, lengthen, alter, empty, to_directory]


def test_a_whole_index_is_verified(copy: Declaration) -> None:
    reported: list[tuple[int, int]] = []
    manifest = verify(copy.path, report=lambda done, of: reported.append((done, of)))
    assert reported[-1] == (manifest.size, manifest.size)
    assert manifest.built_with == "infini-gram 2.6.0"


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
async def test_a_damaged_file_is_named_and_the_other_index_opened(
    built: BuiltIndex,
    copy: Declaration,
    kind: str,
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    file = copy.path / f"{kind}.0"
    damage(file)
    with pytest.raises(ManifestError) as raised:
        verify(copy.path)
    assert str(file) in str(raised.value)
    async with Indexes([copy, built.declaration]) as indexes:
        assert indexes.names == ["small"]
        # Clients need not know where on this machine it is.
        assert indexes.failures["copy"].startswith(file.name)
        assert str(copy.path) not in indexes.failures["copy"]
        assert str(file) in caplog.text
        with pytest.raises(IndexUnavailableError, match=f"{kind}.0"):
            await indexes.run("copy", lambda engine: engine.total_tokens)
        assert await indexes.run("small", lambda engine: engine.count([]).count) > 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"format": 2}, "format 2 is not known here"),
        ({"token_dtype": "u8"}, "do not fit together"),
        ({"token_dtype": "u32"}, "do not fit together"),
        ({"token_dtype": "u64"}, "token_dtype"),
        ({"vocab_size": 70_000}, "do not fit together"),
        ({"vocab_size": 2**24 + 1}, "vocab_size"),
        ({"end_id": 5000}, "do not fit together"),
        ({"tokens": 7}, "do not fit tokens and documents"),
        ({"documents": 7}, "do not fit tokens and documents"),
        ({"shards": 2}, "is missing or unknown"),
        ({"files": {}}, "is missing or unknown"),
        ({"tokenizer_sha256": "0" * 64}, "built with another tokenizer"),
        ({"tokenizer_sha256": None}, "was built of bytes, and is declared with"),
    ],
)
async def test_manifests_that_are_wrong(
    copy: Declaration, change: dict[str, object], problem: str
) -> None:
    file = copy.path / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    async with Indexes([copy]) as indexes:
        assert problem in indexes.failures["copy"]
        assert "\n" not in indexes.failures["copy"]
        assert str(copy.path) not in indexes.failures["copy"]


async def test_other_ways_to_be_wrong(copy: Declaration, tmp_path: Path) -> None:
    for damage, problem in (
        (lambda: (copy.path / "tokenized.1").write_bytes(b"x"), "the engine would read it"),
        (lambda: (copy.path / "tokenizer.json").write_text("{}"), "no tokenizer.json"),
        (lambda: (copy.path / "manifest.json").write_text("{"), "manifest.json: "),
        (lambda: (copy.path / "manifest.json").unlink(), "is missing: build the index"),
        (lambda: shutil.rmtree(copy.path), "its folder is not a directory"),
    ):
        damage()
        async with Indexes([copy]) as indexes:
            assert problem in indexes.failures["copy"]
        (copy.path / "tokenized.1").unlink(missing_ok=True)
    as_bytes = Declaration("empty", tmp_path, BYTES)
    async with Indexes([as_bytes]) as indexes:
        assert "manifest.json is missing" in indexes.failures["empty"]


async def test_unknown_names(built: BuiltIndex) -> None:
    async with Indexes([built.declaration]) as indexes:
        with pytest.raises(UnknownIndexError) as raised:
            await indexes.run("large", lambda engine: engine.total_tokens)
        assert raised.value.extra == {"known_indexes": ["small"]}
    with pytest.raises(IndexUnavailableError, match="not open"):
        indexes.engine("small")


# --- Checksums are computed once -----------------------------------------------------------------


async def test_what_was_found_good_is_not_read_again(
    copy: Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[list[str]] = []
    check = manifests.check_contents

    def note(*arguments: object) -> None:
        checked.append(arguments[2])  # type: ignore[arg-type] # the names
        check(*arguments)  # type: ignore[arg-type] # passed on

    monkeypatch.setattr(manifests, "check_contents", note)
    for _ in range(3):
        async with Indexes([copy]) as indexes:
            assert indexes.names == ["copy"]
    assert checked == [[f"{kind}.0" for kind in KINDS]]
    file = copy.path / "table.0"
    file.write_bytes(file.read_bytes())  # the same, and newer
    async with Indexes([copy]) as indexes:
        assert indexes.names == ["copy"]
    assert checked[1:] == [["table.0"]]
    alter(file)
    async with Indexes([copy]) as indexes:
        assert "table.0 was altered" in indexes.failures["copy"]


async def test_a_notebook_that_is_broken_or_unwritable_changes_nothing(copy: Declaration) -> None:
    for content in ("{", "[]", '{"table.0": 1}'):
        (copy.path / "verified.json").write_text(content)
        async with Indexes([copy]) as indexes:
            assert indexes.names == ["copy"]
    (copy.path / "verified.json").unlink()
    (copy.path / "verified.json").mkdir()
    async with Indexes([copy]) as indexes:
        assert indexes.names == ["copy"]
    assert not list(copy.path.glob("*.new"))


async def test_a_big_index_is_opened_first_and_taken_away_when_it_is_wrong(
    built: BuiltIndex,
    copy: Declaration,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opened, "CHECK_FIRST_BYTES", 0)
    (built.declaration.path / "verified.json").unlink(missing_ok=True)
    alter(copy.path / "metadata.0")
    caplog.set_level(logging.INFO)
    async with Indexes([copy, built.declaration]) as indexes:
        assert "its checksums are being computed" in caplog.text

        async def is_all_checked() -> bool:
            found_good = (built.declaration.path / "verified.json").exists()
            return found_good and "copy" in indexes.failures

        await until(is_all_checked)
        assert indexes.names == ["small"]
        with pytest.raises(IndexUnavailableError, match=r"metadata\.0 was altered"):
            indexes.engine("copy")


async def test_an_attribution_notices_that_its_index_was_taken_away(
    copy: Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "CHECK_FIRST_BYTES", 0)
    alter(copy.path / "metadata.0")
    async with Indexes([copy]) as indexes:

        async def is_checked() -> bool:
            return bool(indexes.failures)

        await until(is_checked)
        indexes.open_changed([copy])  # as before each attribution: it was not replaced
        request = orjson.dumps({"text": "a", "parameters": {}})
        kind, message, *_ = engine_main._attribute(indexes, "copy", request)
    assert (kind, b"metadata.0 was altered" in message) == ("engine", True)


# --- Indexes that are declared later, or replaced --------------------------------------------------


async def test_an_added_index_is_opened_without_a_restart(
    built: BuiltIndex,
    copy: Declaration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = tmp_path / "indexes.toml"
    add_declaration(file, built.declaration)
    damaged = copy.path / "table.0"
    whole = damaged.read_bytes()
    look, looks = Indexes._look, 0

    def counted(indexes: Indexes) -> tuple[Any, ...]:
        nonlocal looks
        looks += 1
        return look(indexes)

    monkeypatch.setattr(Indexes, "_look", counted)
    async with Indexes(read_declarations(file), file=file) as indexes:
        first = indexes.engine("small")
        cut(damaged)
        add_declaration(file, copy)

        async def has_failed() -> bool:
            return "copy" in indexes.failures

        await until(has_failed)
        damaged.write_bytes(whole)
        declared = file.read_text()
        file.write_text("[indexes")

        async def is_reported() -> bool:
            return "the indexes stay as they are" in caplog.text

        await until(is_reported)
        assert indexes.names == ["small"]
        file.write_text(declared)

        async def is_open() -> bool:
            return indexes.names == ["small", "copy"]

        await until(is_open)
        assert indexes.failures == {}
        assert await indexes.run("copy", lambda engine: engine.total_documents) == 120
        file.unlink()
        after = looks + 2  # one may be under way
        await until(lambda: asyncio.sleep(0, looks >= after))
        assert indexes.names == ["small", "copy"]
        assert indexes.engine("small") is first, "an open index is not opened again"


async def test_the_file_is_watched_after_an_unexpected_error(
    built: BuiltIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = tmp_path / "indexes.toml"
    file.write_text("")
    add, looks = Indexes._open_declared, 0

    def fail_once(indexes: Indexes, path: Path) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            raise RuntimeError("unexpected")
        add(indexes, path)

    monkeypatch.setattr(Indexes, "_open_declared", fail_once)
    async with Indexes([], file=file) as indexes:
        add_declaration(file, built.declaration)

        async def has_failed() -> bool:
            return looks == 1

        await until(has_failed)
        file.write_text(file.read_text() + "\n")

        async def is_open() -> bool:
            return indexes.names == ["small"]

        await until(is_open)


def rebuild(declaration: Declaration, texts: Sequence[str]) -> None:
    """Replace the index by one of these texts, as `index build --replace` does."""
    corpus = declaration.path.with_suffix(".jsonl")
    corpus.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in texts))
    build(BuildOptions(corpus, declaration.path, str(DEMO_TOKENIZER), replace=True))


async def test_a_replaced_index_is_opened_anew(
    built: BuiltIndex, copy: Declaration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries that have begun end in the old one."""
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = tmp_path / "indexes.toml"
    add_declaration(file, copy)
    has_begun, may_end = threading.Event(), threading.Event()

    def count_late(engine: Engine) -> int:
        has_begun.set()
        assert may_end.wait(60)
        return engine.count([]).count

    async with Indexes(read_declarations(file), file=file) as indexes:
        old = indexes.engine("copy")
        late = asyncio.create_task(indexes.run("copy", count_late))
        await asyncio.to_thread(has_begun.wait, 60)
        await asyncio.to_thread(rebuild, copy, ["a new text", "another"])

        async def is_new() -> bool:
            return indexes.engine("copy").total_documents == 2

        await until(is_new)
        assert indexes.failures == {}
        new = indexes.engine("copy")
        assert new.version != old.version
        may_end.set()
        assert await late == built.engine.count([]).count
        await asyncio.to_thread(indexes.open_changed, [copy])
        assert indexes.engine("copy") is new, "it is opened once"


async def test_an_index_stays_open_beside_a_replacement_that_fails_its_checks(
    copy: Declaration,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = tmp_path / "indexes.toml"
    add_declaration(file, copy)
    async with Indexes(read_declarations(file), file=file) as indexes:
        old = indexes.engine("copy")
        manifest = copy.path / "manifest.json"
        whole = manifest.read_text()
        manifest.write_text("{}")

        async def is_reported() -> bool:
            return "index copy is not open" in caplog.text

        await until(is_reported)
        assert indexes.engine("copy") is old
        assert (indexes.names, indexes.failures) == (["copy"], {})
        manifest.write_text(whole)

        async def is_new() -> bool:
            return indexes.engine("copy") is not old

        await until(is_new)


async def test_a_check_of_replaced_files_does_not_close_the_new_index(
    copy: Declaration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of the old index, in the background, reads files of both."""
    monkeypatch.setattr(opened, "CHECK_FIRST_BYTES", 0)
    is_checking, is_replaced = threading.Event(), threading.Event()
    check = manifests.check_contents

    def check_slowly(*arguments: Any) -> None:
        is_checking.set()
        assert is_replaced.wait(60)
        check(*arguments)

    monkeypatch.setattr(manifests, "check_contents", check_slowly)
    (copy.path / "verified.json").unlink(missing_ok=True)
    indexes = Indexes([copy])
    indexes.open_blocking()
    assert await asyncio.to_thread(is_checking.wait, 60)
    old = indexes.engine("copy")
    await asyncio.to_thread(rebuild, copy, ["a new text", "another"])
    indexes.open_changed([copy])
    new = indexes.engine("copy")
    assert new is not old
    is_replaced.set()
    for checker in indexes._checkers:
        await asyncio.to_thread(checker.join)
    assert indexes.engine("copy") is new
    indexes.close()


async def test_an_attribution_process_opens_a_replaced_index(
    copy: Declaration, tmp_path: Path
) -> None:
    file = tmp_path / "indexes.toml"
    add_declaration(file, copy)
    process = await EngineProcess.start(file, "copy")
    try:
        before = await process.attribute("a new text", {})
        await asyncio.to_thread(rebuild, copy, ["a new text", "another"])
        after = await process.attribute("a new text", {})
        file.write_text("[indexes")
        await process.attribute("it stays open beside an invalid file", {})
    finally:
        await process.end()
    assert before.version != after.version == Engine(copy).version


async def test_a_running_api_serves_an_added_index(
    settings: Settings, built: BuiltIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = tmp_path / "indexes.toml"
    file.write_text("")
    changed = settings.model_copy(update={"indexes_file": file})
    async with run_service(changed, with_worker=False) as service:
        assert (await service.client.get("/indexes")).json() == []
        add_declaration(file, built.declaration)

        async def is_served() -> bool:
            return bool((await service.client.get("/indexes")).json() == ["small"])

        await until(is_served)
        answer = await service.client.post("/small/count", json={"query": " zyzzyva"})
        assert answer.json()["count"] == 1


# --- Threads -------------------------------------------------------------------------------------


@pytest.mark.trial
async def test_the_loop_is_not_held(built: BuiltIndex) -> None:
    """It turns while a query works: a call on the loop would leave it one turn."""
    ids = [one for document in built.documents for one in document]
    async with Indexes([built.declaration]) as indexes:
        query = asyncio.create_task(
            indexes.run("small", lambda engine: engine.attribute(ids, [], 1, 1_000_000, True))
        )
        turns = 0
        while not query.done():
            await asyncio.sleep(0)
            turns += 1
        assert await query
    assert turns > 100


async def test_as_many_as_there_are_threads_and_places(built: BuiltIndex) -> None:
    go_on = threading.Event()
    running: list[str] = []

    def wait(_: object) -> str:
        running.append(threading.current_thread().name)
        go_on.wait(60)
        return "done"

    async with Indexes([built.declaration], threads=2, queue=3) as indexes:
        calls = [asyncio.create_task(indexes.run("small", wait)) for _ in range(5)]

        async def are_running() -> bool:
            return len(running) == 2

        await until(are_running)
        with pytest.raises(IndexBusyError) as raised:
            await indexes.run("small", wait)
        assert raised.value.headers["Retry-After"]
        assert len(running) == 2
        # A caller that goes away leaves its place, if its call has not begun.
        calls[4].cancel()
        await asyncio.gather(calls[4], return_exceptions=True)
        calls.append(asyncio.create_task(indexes.run("small", wait)))
        await asyncio.sleep(0)
        # One that has begun keeps it to its end.
        calls[0].cancel()
        await asyncio.gather(calls[0], return_exceptions=True)
        with pytest.raises(IndexBusyError):
            await indexes.run("small", wait)
        go_on.set()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        assert answers.count("done") == 4
        assert len(running) == 5
        assert await indexes.run("small", wait) == "done"


async def test_what_a_call_raises_is_raised(built: BuiltIndex) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError

    async with Indexes([built.declaration], threads=1, queue=0) as indexes:
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                await indexes.run("small", fail)
        assert await indexes.run("small", lambda engine: engine.total_documents) == 120
