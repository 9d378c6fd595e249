"""Commands of a session, read from their JSON (docs/sessions.md)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from script import RefusedError

COMMANDS = ("open", "submit", "cancel", "live", "lazy", "ack", "close")


@dataclass(frozen=True)
class Resumed:
    """The client's part of a lost generation."""

    token_ids: list[int]
    text: str


@dataclass(frozen=True)
class Submission:
    slot: int
    prompt: str
    parameters: dict[str, Any]
    live: bool = False
    token_ids: bool = False
    resume: Resumed | None = None


@dataclass(frozen=True)
class Opening:
    flush_seconds: float = 0.5
    window: int | None = None  # responses


def read_commands(encoded: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Names and values of the commands, one by one. Raises RefusedError at the first wrong one."""
    for text in encoded:
        try:
            command = json.loads(text)
        except ValueError as error:
            raise RefusedError(f"a command is not JSON: {error}") from None
        if not isinstance(command, dict) or len(command) != 1:
            raise RefusedError("a command must be a JSON object with one member")
        ((name, value),) = command.items()
        if name not in COMMANDS:
            raise RefusedError(f"unknown command {name!r}; known: {', '.join(COMMANDS)}")
        try:
            yield name, read_value(name, value)
        except (TypeError, KeyError) as error:
            raise RefusedError(f"command {name}: wrong or missing members: {error}") from None


def read_value(name: str, value: Any) -> Any:
    if name == "open":
        opening = Opening(**value)
        demand(name, opening.flush_seconds, (int, float))
        demand(name, opening.window, (int, type(None)))
        return opening
    if name == "submit":
        members = dict(demand(name, value, dict))
        if members.get("resume") is not None:
            members["resume"] = resume = Resumed(**members["resume"])
            demand(name, resume.token_ids, list)
            demand(name, resume.text, str)
        submission = Submission(**members)
        demand(name, submission.slot, int)
        demand(name, submission.prompt, str)
        demand(name, submission.parameters, dict)
        return submission
    if name in ("cancel", "live", "lazy"):
        demand(name, value, list)
        for slot in value:
            demand(name, slot, int)
        return value
    return demand(name, value, bool if name == "close" else int)


def demand(name: str, value: Any, kinds: Any) -> Any:
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
        raise RefusedError(f"command {name}: {value!r:.100} has the wrong type")
    return value
