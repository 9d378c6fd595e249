"""Findings of the checks.

`fail`: the service does not work, or breaks a promise. `warn`: it works, and the operator should look.
"""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(slots=True, frozen=True)
class Finding:
    part: str
    level: Level
    found: str
    to_do: str = ""


def ok(part: str, found: str) -> Finding:
    return Finding(part, Level.OK, found)


def warn(part: str, found: str, to_do: str) -> Finding:
    return Finding(part, Level.WARN, found, to_do)


def fail(part: str, found: str, to_do: str) -> Finding:
    return Finding(part, Level.FAIL, found, to_do)
