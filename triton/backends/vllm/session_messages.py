"""Commands of an engine session (docs/sessions.md), from JSON. Imports nothing of Triton or vLLM."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

_MAX_INT32 = 2**31 - 1


class MessageError(ValueError):
    """The message cannot be read, or its session does not have what it names."""


@dataclass(frozen=True)
class Open:
    flush_seconds: float
    window: int | None  # responses beyond the last ack


@dataclass(frozen=True)
class Submit:
    slot: int
    prompt: str
    parameters: dict[str, Any]
    live: bool
    token_ids: bool
    resume: tuple[list[int], str] | None  # ids and text of the lost generation
    prompt_token_ids: list[int] | None = None  # the prompt as the engine reads it


@dataclass(frozen=True)
class Cancel:
    slots: list[int]


@dataclass(frozen=True)
class Watch:
    """The commands `live` and `lazy`."""

    slots: list[int]
    live: bool


@dataclass(frozen=True)
class Ack:
    responses: int  # of the session in all


@dataclass(frozen=True)
class Close:
    pass


Command = Open | Submit | Cancel | Watch | Ack | Close


def read_commands(encoded: Iterable[bytes]) -> list[Command]:
    """Raises MessageError, which names the wrong command by its place in the message."""
    commands = []
    for place, one in enumerate(encoded, start=1):
        try:
            commands.append(_read_command(one))
        except MessageError as error:
            raise MessageError(f"session_commands: command {place}: {error}") from None
    return commands


def _read_command(encoded: bytes) -> Command:
    try:
        given = json.loads(encoded)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    if not isinstance(given, dict) or len(given) != 1:
        raise MessageError("must be a JSON object with one member")
    ((name, value),) = given.items()
    if name not in _READERS:
        raise MessageError(f"unknown command {name!r:.100}")
    return _READERS[name](value)


def _read_open(value: Any) -> Command:
    _check_members("open", value, required={"flush_seconds"}, optional={"window"})
    seconds, window = value["flush_seconds"], value.get("window")
    is_duration = type(seconds) in (int, float) and 0 <= seconds <= _MAX_INT32
    _check(is_duration, "open: flush_seconds must be a number of seconds")
    _check(window is None or _is_int(window, 1), "open: window must be an integer above 0")
    return Open(float(seconds), window)


def _read_submit(value: Any) -> Command:
    required = {"slot", "prompt", "parameters"}
    _check_members(
        "submit", value, required, optional={"live", "token_ids", "resume", "prompt_token_ids"}
    )
    _check(_is_int(value["slot"], 1), "submit: slot must be an integer above 0")
    _check(isinstance(value["prompt"], str), "submit: prompt must be a string")
    _check(isinstance(value["parameters"], dict), "submit: parameters must be a JSON object")
    for name in ("live", "token_ids"):
        _check(isinstance(value.get(name, False), bool), f"submit: {name} must be true or false")
    ids = value.get("prompt_token_ids")
    _check(ids is None or _is_ids(ids), "submit: prompt_token_ids must be a list of integers")
    return Submit(
        slot=value["slot"],
        prompt=value["prompt"],
        parameters=value["parameters"],
        live=value.get("live", False),
        token_ids=value.get("token_ids", False),
        resume=_read_resume(value["resume"]) if value.get("resume") is not None else None,
        prompt_token_ids=ids,
    )


def _read_resume(value: Any) -> tuple[list[int], str]:
    _check_members("submit: resume", value, required={"token_ids", "text"}, optional=set())
    ids, text = value["token_ids"], value["text"]
    _check(_is_ids(ids), "submit: resume: token_ids must be a list of integers")
    _check(isinstance(text, str), "submit: resume: text must be a string")
    return ids, text


def _read_slots(name: str, value: Any) -> list[int]:
    is_list = isinstance(value, list) and all(_is_int(one, 1) for one in value)
    _check(is_list, f"{name} must be a list of slots")
    slots: list[int] = value
    return slots


def _read_ack(value: Any) -> Command:
    _check(_is_int(value, 0), "ack must be a number of responses")
    return Ack(value)


def _read_close(value: Any) -> Command:
    _check(value is True, "close must be true")
    return Close()


_READERS: dict[str, Callable[[Any], Command]] = {
    "open": _read_open,
    "submit": _read_submit,
    "cancel": lambda value: Cancel(_read_slots("cancel", value)),
    "live": lambda value: Watch(_read_slots("live", value), live=True),
    "lazy": lambda value: Watch(_read_slots("lazy", value), live=False),
    "ack": _read_ack,
    "close": _read_close,
}


def _check_members(name: str, value: Any, required: set[str], optional: set[str]) -> None:
    _check(isinstance(value, dict), f"{name} must be a JSON object")
    if missing := sorted(required - value.keys()):
        raise MessageError(f"{name}: {', '.join(missing)} is required")
    if unknown := sorted(value.keys() - required - optional):
        raise MessageError(f"{name}: unknown member: {', '.join(unknown):.100}")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(_is_int(one, -_MAX_INT32) for one in value)


def _is_int(value: Any, least: int) -> bool:
    return type(value) is int and least <= value <= _MAX_INT32


def _check(is_right: bool, message: str) -> None:
    if not is_right:
        raise MessageError(message)
