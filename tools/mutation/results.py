"""Verdicts on disk, a line of JSON each, so that an interrupted run goes on; and their report."""

import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath

from tools.mutation.mutants import Mutant
from tools.mutation.runner import Verdict

EQUIVALENTS = Path(__file__).with_name("equivalents.toml")
LEASE = "app/worker/lease.py"
_GOALS = {"queue": 90, "auth": 90, "lease": 90}
_GOAL = 80  # % of the other rooms


class Results:
    """The last verdict of each mutant."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._verdicts: dict[tuple[str, str], Verdict] = {}
        for line in file.read_text().splitlines() if file.exists() else ():
            values = json.loads(line)
            key = values.pop("name"), values.pop("digest")
            self._verdicts[key] = Verdict(**values)

    def get(self, mutant: Mutant) -> Verdict | None:
        return self._verdicts.get((mutant.name, mutant.digest))

    def add(self, mutant: Mutant, verdict: Verdict) -> None:
        self._verdicts[mutant.name, mutant.digest] = verdict
        line = json.dumps({"name": mutant.name, "digest": mutant.digest} | asdict(verdict))
        with self._file.open("a") as file:
            file.write(f"{line}\n")


@dataclass(frozen=True)
class Score:
    room: str
    mutants: int
    killed: int
    equivalent: int
    goal: int

    @property
    def percent(self) -> float:
        return 100 * self.killed / max(1, self.mutants - self.equivalent)


def read_equivalents(file: Path = EQUIVALENTS) -> dict[str, str]:
    """Return the reasons why some mutants behave as the code does, by their names."""
    entries = tomllib.loads(file.read_text()).get("equivalent", [])
    return {name: entry["reason"] for entry in entries for name in entry["mutants"]}


def scores(mutants: Iterable[Mutant], results: Results, equivalents: Iterable[str]) -> list[Score]:
    """Return a score for each room, of the mutants that have a verdict."""
    known = set(equivalents)
    total, killed, equivalent = Counter[str](), Counter[str](), Counter[str]()
    for mutant in mutants:
        if verdict := results.get(mutant):
            room = room_of(mutant.path)
            total[room] += 1
            if verdict.outcome in ("killed", "timeout"):
                killed[room] += 1
            elif mutant.name in known:
                equivalent[room] += 1
    return [
        Score(room, total[room], killed[room], equivalent[room], _GOALS.get(room, _GOAL))
        for room in sorted(total)
    ]


def survivors(
    mutants: Iterable[Mutant], results: Results, equivalents: Iterable[str]
) -> list[Mutant]:
    known = set(equivalents)
    return [
        mutant
        for mutant in mutants
        if (verdict := results.get(mutant))
        and verdict.outcome in ("survived", "untested")
        and mutant.name not in known
    ]


def table(found: Sequence[Score]) -> str:
    """Return the scores as a Markdown table."""
    lines = ["| room | mutants | killed | equivalent | score | goal |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {one.room} | {one.mutants} | {one.killed} | {one.equivalent} | {one.percent:.1f} % "
        f"| {one.goal} % |"
        for one in found
    ]
    return "\n".join(lines)


def room_of(path: str) -> str:
    return "lease" if path == LEASE else PurePath(path).parts[1]
