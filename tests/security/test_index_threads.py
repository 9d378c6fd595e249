"""Index queries where the system refuses threads: the engine would end the process, the API."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.core.errors import IndexUnavailableError
from app.infini_gram.thread_budget import ThreadBudget, engine_thread_limit
from tests.conftest import ROOT
from tests.indexes import BuiltIndex, build_index, some_texts

# Address space for so many threads of the engine at a time; those of Python need less.
STACK_MEGABYTES, ROOM = 64, 50

QUERIES = """
import asyncio, resource, sys, threading
from pathlib import Path
from app.infini_gram.declarations import BYTES, Declaration
from app.infini_gram.indexes import Indexes
from app.infini_gram.thread_budget import ThreadBudget

path, stack, room, query = Path(sys.argv[1]), *map(int, sys.argv[2:4]), sys.argv[4]

async def main():
    budget = ThreadBudget(40)
    async with Indexes([Declaration("x", path, BYTES)], threads=8, budget=budget) as indexes:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        most = used + stack * room * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        call = eval("lambda engine: " + query)
        print(len(await asyncio.gather(*(indexes.run("x", call) for _ in range(64)))))

threading.stack_size(2**18)
asyncio.run(main())
"""


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> BuiltIndex:
    return build_index(tmp_path_factory.mktemp("threads"), some_texts())


@pytest.mark.parametrize(
    "query",
    [
        "engine.ntd([32], 10_000)",
        "engine.infgram_ntd([255 - 1, 32], 10_000)",
        "engine.find_cnf([[[32]] * 4] * 4, 500_000, 100)",
        "engine.count_cnf([[[32]] * 4] * 4, 500_000, 100)",
    ],
)
def test_queries_stay_within_the_threads_of_a_container(index: BuiltIndex, query: str) -> None:
    """A second for each: a process of its own, which a refused thread would end by SIGABRT."""
    ended = subprocess.run(
        ["sh", "-c", f'ulimit -s {STACK_MEGABYTES * 1024}; exec "$@"', "sh", sys.executable, "-c",
         QUERIES, index.declaration.path, str(STACK_MEGABYTES), str(ROOM), query],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},  # a thread may reserve an arena, else
        cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "64\n"), ended.stderr


def test_a_query_beyond_all_threads_is_refused(index: BuiltIndex) -> None:
    threads = ThreadBudget(35)
    index.engine._threads = threads
    assert index.engine.count_cnf([[[32]] * 4] * 3, 100, 100).count
    with pytest.raises(IndexUnavailableError, match="needs up to 36 threads"):
        index.engine.count_cnf([[[32]] * 4] * 4, 100, 100)
    assert index.engine.count([32]).count


def test_a_query_waits_for_threads_of_others() -> None:
    budget, has_begun = ThreadBudget(10), threading.Event()

    def wait() -> None:
        with budget.take(5):
            has_begun.set()

    waiting = threading.Thread(target=wait)
    with budget.take(4), budget.take(6):
        waiting.start()
        assert not has_begun.is_set()
    waiting.join(60)
    assert has_begun.is_set()


def test_half_of_the_smallest_limit_is_the_engines(tmp_path: Path) -> None:
    (unlimited := tmp_path / "pids.max").write_text("max\n")
    (container := tmp_path / "v1").write_text("256\n")
    files = (unlimited, tmp_path / "absent", container)
    assert engine_thread_limit(files) == 128
    assert engine_thread_limit((unlimited,)) >= 1
