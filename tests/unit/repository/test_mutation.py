"""The faults that `make mutate` plants, which tests it runs for each, and what it reports."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tools.mutation.mutants import Mutant, find_mutants
from tools.mutation.results import Results, read_equivalents, scores, survivors
from tools.mutation.runner import Verdict
from tools.mutation.uses import Uses

ROOT = Path(__file__).resolve().parents[3]


def mutants_of(directory: Path, code: str, path: str = "app/queue/claim.py") -> list[Mutant]:
    file = directory / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(code))
    return find_mutants(directory, path)


def edits(mutants: list[Mutant]) -> set[str]:
    return {one.name.partition(": ")[2] for one in mutants}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", {"comparison: < -> <="}),
        ("return a is not b", {"comparison: is not -> is"}),
        ("return a not in b", {"comparison: not in -> in"}),
        ("return a and b", {"and/or: and -> or"}),
        ("return not a", {"not dropped: not ->"}),
        ("return a + b", {"arithmetic: + -> -"}),
        ("return a + 'text'", set()),
        ("return [x for x in a if x]", {"filter dropped: x -> True"}),
        ("return max(a, b)", {"call: max -> min"}),
        ("return a[:3]", {"off by one: 3 -> 4"}),
        ("return a[:300]", set()),
        ("return f(a=True)", {"flag: True -> False"}),
        ("await a.write(b)", {"call dropped: await a.write(b) -> pass"}),
        ("logger.info(a)", set()),
        ("assert a < b", set()),
        ("a += b", {"assignment: += -> -="}),
        ("a |= b", {"assignment: |= -> ="}),
        ("if a:\n        return", {"guard dropped: a -> False"}),
        ("if a:\n        b = a", {"condition negated: a -> not (a)"}),
        ('"""Docstring with WHERE a AND b."""', set()),
    ],
)
def test_edits_of_python(tmp_path: Path, body: str, expected: set[str]) -> None:
    mutants = mutants_of(tmp_path, f"async def f(a: int = 1 + 2, b: bool = True):\n    {body}\n")
    assert edits(mutants) == expected


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        (
            "DELETE FROM t WHERE a = $1 AND (b OR c)",
            {
                "SQL comparison: = -> <>",
                "SQL condition dropped: a = $1 -> true",
                "SQL condition dropped: (b OR c) -> true",
                "SQL condition dropped: c -> false",
                "SQL and/or: OR -> AND",
            },
        ),
        ("UPDATE t SET a = 1 RETURNING b", set()),
        (
            "SELECT a FROM t WHERE a BETWEEN 1 AND 2",
            {"SQL condition dropped: a BETWEEN 1 AND 2 -> true"},
        ),
        (
            "SELECT a FROM t ORDER BY a DESC, b LIMIT 1",
            {"SQL order: DESC ->", "SQL order: a DESC, ->"},
        ),
        (
            "SELECT coalesce(a, f(b), 0) FROM t FOR UPDATE SKIP LOCKED",
            {
                "SQL NULL: coalesce(a, f(b), 0) -> a",
                "SQL lock: SKIP LOCKED ->",
                "SQL lock: FOR UPDATE SKIP LOCKED ->",
            },
        ),
        (
            "SELECT 1 FROM t LEFT JOIN u ON {t} WHERE a IS NULL",
            {
                "SQL join: LEFT JOIN -> JOIN",
                "SQL condition dropped: {t} -> true",
                "SQL NULL: IS NULL -> IS NOT NULL",
                "SQL condition dropped: a IS NULL -> true",
            },
        ),
    ],
)
def test_edits_of_sql(tmp_path: Path, sql: str, expected: set[str]) -> None:
    assert edits(mutants_of(tmp_path, f'_SQL = f"{sql}"\n')) == expected


def test_a_mutant_names_its_place(tmp_path: Path) -> None:
    code = """
        # Non-ASCII text moves places in bytes: \u00fc\u00fc.
        class Queue:
            def claim(self, free: int) -> bool:
                if free < 0 or free < 0:
                    return False
                return (
                    free > 1
                )
        """
    mutants = mutants_of(tmp_path, code)
    name = "app/queue/claim.py:Queue.claim: comparison: < -> <="
    same = [one for one in mutants if one.name.startswith(name)]
    assert [one.name for one in same] == [name, f"{name} #2"]
    assert [one.lines for one in same] == [(5,), (5,)]
    assert b"if free <= 0 or free < 0:" in same[0].apply(tmp_path)
    assert b"if free < 0 or free <= 0:" in same[1].apply(tmp_path)
    bound = next(one for one in mutants if "> -> >=" in one.name)
    assert bound.lines == (7, 8)


def test_a_constant_has_the_lines_that_use_it(tmp_path: Path) -> None:
    (tmp_path / "app/queue").mkdir(parents=True)
    (tmp_path / "app/queue/sql.py").write_text(
        "_PART = 'WHERE a'\ndef text():\n    return _PART\nFULL = f'SELECT {text()}'\nREST = 1\n"
    )
    (tmp_path / "app/queue/claim.py").write_text(
        "from app.queue.sql import FULL as SQL, REST\n\ndef claim():\n    return SQL\n"
    )
    (tmp_path / "app/queue/cancel.py").write_text(
        "from app.queue import sql\ndef cancel():\n    return 1, sql.FULL\n"
    )
    uses = Uses(tmp_path, "app")
    assert uses.lines("app/queue/sql.py", "_PART") == {
        ("app/queue/sql.py", 3),
        ("app/queue/claim.py", 4),
        ("app/queue/cancel.py", 3),
    }
    assert uses.lines("app/queue/sql.py", "REST") == set()


def test_verdicts_are_kept_until_the_definition_changes(tmp_path: Path) -> None:
    first, second = mutants_of(tmp_path, "def f(a):\n    return a < 1\n")
    results = Results(tmp_path / "results.jsonl")
    results.add(first, Verdict("killed", 3, 0.5, "tests/unit/test_a.py::test_b"))
    results.add(second, Verdict("survived", 3, 0.5))
    results = Results(tmp_path / "results.jsonl")
    assert results.get(first) == Verdict("killed", 3, 0.5, "tests/unit/test_a.py::test_b")

    (score,) = scores([first, second], results, [])
    assert (score.room, score.mutants, score.killed, score.percent) == ("queue", 2, 1, 50)
    assert survivors([first, second], results, []) == [second]
    (score,) = scores([first, second], results, [second.name])
    assert (score.equivalent, score.percent) == (1, 100)
    assert survivors([first, second], results, [second.name]) == []

    changed = mutants_of(tmp_path, "def f(a):\n    return a < 1 or a\n")
    assert [results.get(one) for one in changed] == [None] * 3


@pytest.mark.trial
def test_equivalent_mutants_exist() -> None:
    names = read_equivalents()
    files = {name.partition(":")[0] for name in names}
    assert all(names.values())
    assert set(names) <= {one.name for file in files for one in find_mutants(ROOT, file)}


_RUN = """
import sys
from pathlib import Path
from tools.mutation.mutants import find_mutants
from tools.mutation.runner import Runner
from tools.mutation.selection import named_tests
root = Path(sys.argv[1])
sys.path.insert(0, str(root))
import sample  # as the command itself imports part of the service
runner = Runner(root, {}, root / "log", sys.argv[2:])
tests = named_tests(root, ["tests"])
print(None, runner.run(None, tests).outcome)
for mutant in find_mutants(root, "sample.py"):
    verdict = runner.run(mutant, tests)
    print(mutant.edit.replacement.decode(), verdict.outcome, verdict.by)
"""


_CONFIGURATION = """
[pytest]
pythonpath = .
filterwarnings =
    error::ResourceWarning
    error::pytest.PytestUnraisableExceptionWarning
"""


def run_mutants(directory: Path, code: str, test: str, collected: list[str]) -> list[str]:
    (directory / "sample.py").write_text(code)
    (directory / "pytest.ini").write_text(_CONFIGURATION)
    (directory / "tests").mkdir()
    (directory / "tests" / "test_sample.py").write_text(test)
    output = subprocess.check_output(
        [sys.executable, "-c", _RUN, str(directory), *collected], cwd=ROOT, text=True, timeout=100
    )
    return output.splitlines()


@pytest.mark.trial
@pytest.mark.shard("tools")
@pytest.mark.parametrize("collected", [[], ["tests"]], ids=["imported_anew", "code_replaced"])
def test_a_fault_is_seen_by_the_tests_and_not_on_the_disk(
    tmp_path: Path, collected: list[str]
) -> None:
    code = "def is_small(number):\n    return number < 10 and number > 0\n"
    test = "from sample import is_small\n\ndef test_it():\n    assert not is_small(10)\n"
    assert run_mutants(tmp_path, code, test, collected) == [
        "None survived",
        "<= killed tests/test_sample.py::test_it",
        "11 killed tests/test_sample.py::test_it",
        "or killed tests/test_sample.py::test_it",
        ">= survived ",
        "1 survived ",
    ]
    assert (tmp_path / "sample.py").read_text() == code


@pytest.mark.trial
@pytest.mark.shard("tools")
def test_a_fault_that_ends_the_process_or_leaves_a_socket_open_is_found(tmp_path: Path) -> None:
    code = """
        import os, signal, socket

        class Connection:
            def __init__(self):
                self.socket, self.itself = socket.socket(), self

        def check(is_healthy):
            if not is_healthy:
                os.kill(os.getpid(), signal.SIGTERM)

        def connect():
            connection = Connection()
            connection.socket.close()
        """
    test = """
        import sample

        def test_it():
            sample.check(True)
            sample.connect()
        """
    assert run_mutants(tmp_path, textwrap.dedent(code), textwrap.dedent(test), []) == [
        "None survived",
        " killed ",  # `not` dropped: the process ends
        "pass survived ",  # os.kill
        "pass killed ",  # close: the socket is left open
    ]
