"""`python -m app index download` against a server that breaks off, and processes that are killed."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.infini_gram.declarations import read_declarations
from app.infini_gram.download import download
from app.infini_gram.engine import Engine
from app.infini_gram.published_index import DownloadError
from tests.conftest import ROOT
from tests.index_server import PREFIX, Faults, IndexServer
from tests.indexes import DEMO_TOKENIZER, build_index, some_texts

SOURCE = f"s3://bucket/{PREFIX}"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as a bucket has them: also some that are no part of an index."""
    built = build_index(
        tmp_path_factory.mktemp("published"), some_texts(documents=3000), str(DEMO_TOKENIZER)
    )
    directory = built.declaration.path
    (directory / "manifest.json").unlink()
    return directory


@contextlib.contextmanager
def serving(published: Path, faults: Faults = lambda *_: "") -> Iterator[tuple[IndexServer, str]]:
    server = IndexServer(published, faults)
    with server.run() as url:
        yield server, url


def fetch(url: str, into: Path, source: str = SOURCE) -> int:
    return len(asyncio.run(download(source, into, endpoint=url, first_pause=0.01)))


def assert_equal(into: Path, published: Path) -> None:
    names = {one.name for one in published.iterdir()} - {"tokenizer.json", "verified.json"}
    assert {one.name for one in into.iterdir()} == names
    for name in names:
        assert (into / name).read_bytes() == (published / name).read_bytes(), name


def command(url: str, into: Path, *arguments: str) -> list[str]:
    return [
        sys.executable, "-m", "app", "index", "download", SOURCE, "--into", str(into),
        "--endpoint", url, *arguments,
    ]  # fmt: skip


@pytest.mark.trial
def test_a_bucket_is_downloaded_and_adopted(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")  # is not used
    with serving(published) as (_, url):
        done = subprocess.run(
            command(url, tmp_path / "got"), cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("6 files, ")
        assert_equal(tmp_path / "got", published)
        assert fetch(url, tmp_path / "got") == 6, "again: nothing is left to do"
    file = tmp_path / "indexes.toml"
    adopt = [sys.executable, "-m", "app", "index", "adopt", str(tmp_path / "got"), "--name", "got"]
    adopt += ["--tokenizer", str(DEMO_TOKENIZER), "--file", str(file)]
    subprocess.run(adopt, cwd=ROOT, check=True, capture_output=True)
    engine = Engine(read_declarations(file)[0])
    assert engine.total_documents == 3000
    assert engine.count(engine.tokenizer.encode("only here: zyzzyva")).count == 1


def test_an_url_without_a_listing(published: Path, tmp_path: Path) -> None:
    with serving(published) as (server, url):
        assert fetch(url, tmp_path / "got", f"{url}/plain/x/") == 6
        assert server.requests["list"] == 0
    assert_equal(tmp_path / "got", published)


@pytest.mark.parametrize("fault", ["cut", "short", "503", "429", "altered", "500"])
def test_faults_are_survived(published: Path, tmp_path: Path, fault: str) -> None:
    """Each file's first two requests fail, and the listing's."""
    broken = "503" if fault in ("cut", "short", "altered") else fault

    def faults(name: str, number: int) -> str:
        if number > 2:
            return ""
        return broken if name == "list" else fault

    with serving(published, faults) as (server, url):
        assert fetch(url, tmp_path / "got") == 6
    assert_equal(tmp_path / "got", published)
    if fault in ("cut", "short"):
        total = sum(one.stat().st_size for one in (tmp_path / "got").iterdir())
        assert server.sent_bytes <= total + 1000, "no byte is sent twice"
        assert any(start > 0 for _, start in server.ranges)


def test_a_server_without_ranges(published: Path, tmp_path: Path) -> None:
    def faults(name: str, number: int) -> str:
        return "cut" if number == 1 and name != "list" else "whole"

    with serving(published, faults) as (_, url):
        assert fetch(url, tmp_path / "got") == 6
    assert_equal(tmp_path / "got", published)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("altered", "do not match its MD5"),
        ("503", "status 503"),
        ("cut", "giving up"),
        ("403", "status 403"),
        ("404", "status 404"),
    ],
)
def test_a_lasting_fault_ends_it(published: Path, tmp_path: Path, fault: str, problem: str) -> None:
    def faults(name: str, number: int) -> str:
        if name != "table.0":
            return ""
        return fault if fault != "cut" or number == 1 else "503"

    with serving(published, faults) as (_, url):
        with pytest.raises(DownloadError) as raised:
            fetch(url, tmp_path / "got")
        assert "table.0" in str(raised.value)
        assert problem in str(raised.value)
        assert not (tmp_path / "got" / "table.0").exists()
        assert (tmp_path / "got" / ".download").exists(), "the next call continues"


def test_killed_in_the_middle_and_continued(published: Path, tmp_path: Path) -> None:
    into = tmp_path / "got"
    with serving(published) as (server, url):
        server.seconds_per_block = 0.05
        process = subprocess.Popen(command(url, into), cwd=ROOT, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while _bytes(into) < 40_000 and time.monotonic() < deadline:
                time.sleep(0.01)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert _bytes(into) >= 40_000
        parts = {one.name: one.stat().st_size for one in into.glob(".download/*.0")}
        assert not (into / "tokenized.0").exists()
        server.seconds_per_block, server.ranges = 0.0, []
        assert fetch(url, into) == 6
        asked = dict(server.ranges)
        assert parts.items() <= asked.items(), "each begins where its part ends"
        assert len(asked) == len(server.ranges)
    assert_equal(into, published)


def _bytes(into: Path) -> int:
    files = [*into.glob("*.0"), *into.glob(".download/*.0")]
    return sum(one.stat().st_size for one in files if one.exists())


def test_a_new_version_begins_again(published: Path, tmp_path: Path) -> None:
    """Parts of the old version are dropped, and so are its complete files."""
    copy = shutil.copytree(published, tmp_path / "copy")

    def faults(name: str, number: int) -> str:
        return {1: "cut"}.get(number, "404") if name == "table.0" else ""

    with serving(copy, faults) as (server, url):
        with pytest.raises(DownloadError):
            fetch(url, tmp_path / "got")
        for name in ("table.0", "offset.0"):
            file = copy / name
            file.write_bytes(file.read_bytes()[:-8] + b"changed!")
        server.faults = lambda *_: ""
        assert fetch(url, tmp_path / "got") == 6
    assert_equal(tmp_path / "got", copy)


@pytest.mark.trial
def test_what_cannot_be_downloaded(
    published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(published) as (server, url):
        for source, problem in (
            ("s3://bucket/index", "holds no index"),
            ("ftp://a/b", "is no source"),
            ("s3:///x", "is no source"),
            ("indexes/x", "is no source"),
        ):
            with pytest.raises(DownloadError, match=problem):
                fetch(url, tmp_path / "got", source)
        server.hidden = {"offset.0"}
        with pytest.raises(DownloadError, match=r"no whole index: offset\.0 is missing"):
            fetch(url, tmp_path / "got")
        server.hidden = set()
        (tmp_path / "got").mkdir(exist_ok=True)
        (tmp_path / "got" / "table.0").write_text("of another index")
        with pytest.raises(DownloadError, match="is another file"):
            fetch(url, tmp_path / "got")
        server.faults = lambda *_: "403"
        with pytest.raises(DownloadError, match="is not public"):
            fetch(url, tmp_path / "got")
        server.faults = lambda *_: ""
        usage = namedtuple("usage", ["total", "used", "free"])
        monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 64_100_000))
        with pytest.raises(DownloadError, match=r"Too little space in .*: 0\.0"):
            fetch(url, tmp_path / "full")
        assert not list((tmp_path / "full").glob("*.0"))
    with pytest.raises(DownloadError, match="in 8 attempts"):
        fetch(url, tmp_path / "gone")
