"""`index remove`, and processes that have the index open."""

import asyncio
import sys
from pathlib import Path

import orjson
import pytest

from app.core.settings import Settings
from app.infini_gram import indexes as opened
from app.infini_gram.declarations import add_declaration, read_declarations, sole_writer
from app.infini_gram.engine import Engine
from app.infini_gram.indexes import Indexes
from app.infini_gram.process import EngineProcess
from app.infini_gram.reduced_engine import open_engine
from tests.conftest import ROOT, run_service
from tests.indexes import DEMO_TOKENIZER, build_index
from tests.integration.infini_gram.test_index_builder import environment, index
from tests.integration.support import until


def lines(count: int) -> bytes:
    rows = [{"text": f"text {n} of all", "url": f"https://x.test/{n}"} for n in range(count)]
    return b"".join(orjson.dumps(row) + b"\n" for row in rows)


@pytest.fixture
def news(tmp_path: Path) -> Path:
    """A directory with the declarations and the index `news` of 12 documents."""
    (tmp_path / "a.jsonl").write_bytes(lines(12))
    arguments = ("build", tmp_path / "a.jsonl", "--name", "news", "--out", tmp_path / "indexes")
    assert index(tmp_path, *arguments, "--model", "demo").returncode == 0
    return tmp_path


def opened_index(directory: Path) -> Engine:
    (declared,) = read_declarations(directory / "indexes.toml")
    return open_engine(declared)


def blocked(engine: Engine) -> set[int]:
    return {
        number
        for number in range(engine.numbered_documents)
        if engine.document_by_index(number, 0).blocked
    }


@pytest.mark.trial
def test_documents_are_removed_by_the_command(news: Path) -> None:
    file = news / "indexes.toml"
    before = file.read_text().splitlines()
    done = index(news, "remove", "news", "3", "a.jsonl:7")
    assert done.returncode == 0, done.stderr
    assert "2 documents removed from news, 2 in all" in done.stdout
    assert "Running APIs leave them out" in done.stdout
    added = [line for line in file.read_text().splitlines() if line not in before]
    assert added == ['removed = "indexes/news.removed"']
    assert blocked(opened_index(news)) == {3, 7}

    declared = file.read_text()
    (news / "urls").write_text("https://x.test/11\n\nhttps://x.test/3\n")
    done = index(news, "remove", "news", "--by", "url", "--from", news / "urls")
    assert (done.returncode, done.stdout.splitlines()[0]) == (
        0, "1 documents removed from news, 3 in all",
    )  # fmt: skip
    assert file.read_text() == declared
    engine = opened_index(news)
    assert blocked(engine) == {3, 7, 11}
    encode = engine.tokenizer.encode
    assert engine.count(encode(" of all")).count == engine.total_documents == 9
    assert [engine.count(encode(f"text {n} of")).count for n in (3, 4, 11)] == [0, 1, 0]

    manifest = (news / "indexes/news.removed/manifest.json").stat()
    done = index(news, "remove", "news", "7", "3")
    assert (done.returncode, done.stdout) == (0, "0 documents removed from news, 3 in all\n")
    assert (news / "indexes/news.removed/manifest.json").stat() == manifest
    assert index(news, "check", "news").returncode == 0
    listed = index(news, "list").stdout.splitlines()[1].split()
    assert (listed[:2], listed[-1]) == (["news", "12"], "ok")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["news"], "Name documents"),
        (["other", "1"], "declares no index 'other'; there are: news"),
        (["news", "1", "12"], "1 entries name no document of the index: 12"),
        (["news", "a.jsonl:12", "b.jsonl:1"], "2 entries name no document"),
        (["news", "3", "--by", "url"], "1 entries name no document of the index: 3"),
        (["news", "x", "--by", "no member"], "1 entries name no document"),
        (["news", "--from", "no such file"], "no such file: No such file"),
    ],
)
def test_wrong_entries_remove_nothing(news: Path, arguments: list[str], problem: str) -> None:
    before = (news / "indexes.toml").read_bytes()
    done = index(news, "remove", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert problem in done.stderr
    assert (news / "indexes.toml").read_bytes() == before
    assert not (news / "indexes/news.removed").exists()


def test_commands_at_once_lose_no_change(news: Path) -> None:
    """Each reads what is declared and removed, and writes it with its own: the second is refused."""
    file = news / "indexes.toml"
    before = file.read_bytes()
    with sole_writer(file):
        done = index(news, "remove", "news", "3")
        assert (done.returncode, done.stdout) == (2, "")
        assert "Another command that changes" in done.stderr
        arguments = ("build", news / "a.jsonl", "--name", "more", "--out", news / "indexes")
        done = index(news, *arguments)
        assert done.returncode == 1
        assert "not declared: Another command" in done.stderr
        assert '[indexes."more"]' in done.stdout
    assert file.read_bytes() == before
    assert not (news / "indexes/news.removed").exists()
    assert index(news, "remove", "news", "3").returncode == 0
    assert blocked(opened_index(news)) == {3}


def test_documents_that_others_removed_are_not_removed_twice(news: Path) -> None:
    """The line is shown if the table has one already; a directory of others is left alone."""
    file = news / "indexes.toml"
    gone = build_index(news, ["text 5 of all"], str(DEMO_TOKENIZER), "gone")
    declared = file.read_text().replace('[indexes."news"]', '[indexes."news"]\nremoved = "gone"')
    file.write_text(declared)
    assert blocked(opened_index(news)) == {5}
    done = index(news, "remove", "news", "5", "6")
    assert (done.returncode, "not left out yet" in done.stderr) == (1, True)
    assert done.stdout.splitlines()[-1] == 'removed = ["gone", "indexes/news.removed"]'
    assert file.read_text() == declared
    file.write_text(declared.replace('removed = "gone"', done.stdout.splitlines()[-1]))
    assert blocked(opened_index(news)) == {5, 6}
    assert gone.engine.total_documents == 1
    file.write_text(declared)
    done = index(news, "remove", "news", "7")
    assert done.returncode == 2
    assert "news.removed exists, and is not declared" in done.stderr


@pytest.mark.trial
async def test_a_new_build_without_the_removed_documents(
    news: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old index stays open, without them, until the line `removed` is deleted."""
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file, rows = news / "indexes.toml", lines(12).splitlines(keepends=True)
    assert index(news, "remove", "news", "3").returncode == 0
    async with Indexes(read_declarations(file), file=file) as indexes:
        old = indexes.engine("news")
        (news / "a.jsonl").write_bytes(b"".join(rows[:3] + rows[4:6]))
        again = ("build", news / "a.jsonl", "--name", "news", "--out", news / "indexes")
        done = index(news, *again, "--model", "demo", "--replace")
        assert (done.returncode, "delete the line `removed`" in done.stderr) == (1, True)
        indexes.open_changed(read_declarations(file))
        assert indexes.engine("news") is old
        assert blocked(old) == {3}
        text = file.read_text().replace('removed = "indexes/news.removed"\n', "")
        file.write_text(text)

        async def is_new() -> bool:
            return indexes.engine("news").total_documents == 5

        await until(is_new)
    assert index(news, *again, "--model", "demo", "--replace").returncode == 0


def test_documents_of_an_index_without_metadata(tmp_path: Path) -> None:
    built = build_index(tmp_path, ["first", "the last"], name="plain")
    manifest = built.engine.manifests[0]
    files = {name: one for name, one in manifest.files.items() if not name.startswith("meta")}
    manifest.model_copy(update={"files": files}).write(built.declaration.path)
    for name in ("metadata.0", "metaoff.0"):
        (built.declaration.path / name).unlink()
    add_declaration(tmp_path / "indexes.toml", built.declaration)
    done = index(tmp_path, "remove", "plain", "1")
    assert done.returncode == 0, done.stderr
    assert blocked(opened_index(tmp_path)) == {1}


@pytest.mark.trial
async def test_a_running_api_leaves_removed_documents_out(
    settings: Settings, news: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opened, "WATCH_SECONDS", 0.02)
    file = news / "indexes.toml"
    changed = settings.model_copy(update={"indexes_file": file})
    process = await EngineProcess.start(file, "news")
    try:
        async with run_service(changed, with_worker=False) as service:

            async def count(text: str) -> int:
                answer = await service.client.post("/news/count", json={"query": text})
                return int(answer.json()["count"])

            wanted = {"maximumFrequency": 100, "maximumSpanDensity": 1}
            before = await process.attribute("text 4 of all", wanted)
            assert await count("text 4 of all") == 1
            for number, others in (("4", 11), ("5", 10)):
                command = [sys.executable, "-m", "app", "index", "remove", "news", number]
                ran = await asyncio.create_subprocess_exec(
                    *command, env=environment(news), cwd=ROOT
                )
                assert await ran.wait() == 0

                async def is_removed(rest: int = others) -> bool:
                    return await count(" of all") == rest

                await until(is_removed)
            assert await count("text 4 of all") == 0
            page = (await service.client.get("/news/documents/?search=%20of%20all&page=1")).json()
            assert (page["pageCount"], page["totalDocuments"], page["documents"]) == (1, 10, [])
            one = {"documentIndex": 4, "maximumContextLength": 9}
            document = (await service.client.post("/news/get_document_by_index", json=one)).json()
            assert document == {
                "index": "news", "documentIndex": 4, "documentLength": 0, "displayLength": 0,
                "needleOffset": 0, "metadata": {}, "tokenIds": [], "text": "", "blocked": True,
            }  # fmt: skip
            (details,) = (await service.client.get("/indexes?details=true")).json()
            assert details["documents"] == 10
            after = await process.attribute("text 4 of all", wanted)
    finally:
        await process.end()
    assert "https://x.test/4" in before.answer
    assert "https://x.test/4" not in after.answer
    assert after.version == opened_index(news).version != before.version


async def test_a_damaged_index_of_removed_documents_closes_the_index(news: Path) -> None:
    """Better no answer than one with removed documents."""
    assert index(news, "remove", "news", "3").returncode == 0
    table = news / "indexes/news.removed/table.0"
    content = bytearray(table.read_bytes())
    content[0] ^= 1
    table.write_bytes(content)
    async with Indexes(read_declarations(news / "indexes.toml")) as indexes:
        assert "table.0 was altered" in indexes.failures["news"]
        assert str(news) not in indexes.failures["news"]
    assert index(news, "check", "news").returncode == 1
