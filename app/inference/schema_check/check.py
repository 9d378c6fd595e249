"""Compiled checks, and the place in a text at which it does not follow its schema."""

import json
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson

from app.inference.schema_check.cost import Cost
from app.inference.schema_check.relaxed import Relaxed

MAX_TEXT = 250_000  # characters of a text that is checked: some 10 ms to read
MAX_STEPS = 200_000  # some 10 ms, in which the validator holds the interpreter's lock
_MAX_REGEX_BYTES = 1 << 18  # of an automaton
_MAX_CACHED_BYTES = 1 << 19  # of schemas, whose checks have 20 times as many
_LONG_NUMBER = 15  # characters of which a double may not keep all
_MAX_NUMBER = 400
_DRAFTS = ("draft-04", "draft-06", "draft-07", "2019-09", "2020-12")


@dataclass(slots=True, frozen=True)
class Fault:
    """`place` is a JSON pointer (RFC 6901), with `*` for names that the schema does not have."""

    reason: str
    place: str = ""
    is_json: bool = True


@dataclass(slots=True, frozen=True)
class Check:
    """The check of one schema."""

    names: frozenset[str]
    cost: Cost
    validate: Callable[[Any], None]
    error: type[Any]

    def fault_of(self, text: str) -> Fault | None:
        """The first fault of a text; None too if the text cannot be checked within the bounds."""
        if len(text) > MAX_TEXT:
            return None
        try:
            value = json.loads(
                text, parse_float=_number, parse_int=_integer, parse_constant=_refuse
            )
        except json.JSONDecodeError as error:
            return Fault(f"it is no JSON at character {error.pos + 1}", is_json=False)
        except (_TooLargeError, RecursionError):
            return None
        if self.cost.of(value, MAX_STEPS) > MAX_STEPS:
            return None
        try:
            self.validate(value)
        except self.error as error:
            return Fault(_reason(error.kind.name), self._pointer(error.instance_path))
        except ValueError:  # half of a surrogate pair
            return None
        return None

    def _pointer(self, path: Sequence[str | int]) -> str:
        parts = (one if isinstance(one, int) or one in self.names else "*" for one in path)
        return "".join(f"/{str(one).replace('~', '~0').replace('/', '~1')}" for one in parts)


class _TooLargeError(Exception):
    """A number that is not read."""


def _number(text: str) -> float | Decimal:
    """A number with all its digits: 0.99999999999999999999 is below 1."""
    if len(text) > _MAX_NUMBER:
        raise _TooLargeError
    if len(text) > _LONG_NUMBER and "e" not in text.lower():
        return Decimal(text)
    if not math.isfinite(number := float(text)):
        raise _TooLargeError
    return number


def _integer(text: str) -> int:
    if len(text) > _MAX_NUMBER:
        raise _TooLargeError
    return int(text)


def _refuse(name: str) -> float:
    raise json.JSONDecodeError(f"{name} is no JSON", name, 0)


def _reason(keyword: str) -> str:
    if keyword == "not":  # as which alternatives are checked
        return "it fits none of the alternatives (`anyOf`, `oneOf`)"
    if keyword == "falseSchema":
        return "the schema allows no value"
    return f"it does not follow `{keyword}`"


def _compile(schema: Any) -> Check | None:
    import jsonschema_rs  # 6 MB and 50 ms: for processes that check a text

    drafts = (
        jsonschema_rs.Draft4Validator, jsonschema_rs.Draft6Validator, jsonschema_rs.Draft7Validator,
        jsonschema_rs.Draft201909Validator, jsonschema_rs.Draft202012Validator,
    )  # fmt: skip
    named = str(schema.get("$schema", "")) if isinstance(schema, dict) else ""
    known = [draft for name, draft in zip(_DRAFTS, drafts, strict=True) if name in named]
    draft = known[0] if known else drafts[-1]
    try:
        relaxed = Relaxed.of(schema)
        cost = Cost(relaxed.schema, relaxed.states)
        validator = draft(
            relaxed.schema,
            offline=True,  # it fetches no reference
            validate_formats=False,
            pattern_options=jsonschema_rs.RegexOptions(
                size_limit=_MAX_REGEX_BYTES, dfa_size_limit=_MAX_REGEX_BYTES
            ),
        )
    except (ValueError, RecursionError):  # it refers to a part that is not there
        return None
    return Check(frozenset(relaxed.names), cost, validator.validate, jsonschema_rs.ValidationError)


_checks: OrderedDict[bytes, Check | None] = OrderedDict()
_lock = threading.Lock()
_cached_bytes = 0


def is_compiled(schema: Any) -> bool:
    return _key_of(schema) in _checks


def compiled(schema: Any) -> Check | None:
    """The check of a schema, kept for the next text; None if the schema cannot be checked."""
    global _cached_bytes
    key = _key_of(schema)
    with _lock:
        if key in _checks:
            _checks.move_to_end(key)
            return _checks[key]
    check = _compile(schema)
    with _lock:
        if key not in _checks:
            _checks[key] = check
            _cached_bytes += len(key)
        while _cached_bytes > _MAX_CACHED_BYTES:
            oldest, _ = _checks.popitem(last=False)
            _cached_bytes -= len(oldest)
    return check


def _key_of(schema: Any) -> bytes:
    return orjson.dumps(schema)
