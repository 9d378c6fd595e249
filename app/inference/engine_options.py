"""Options of vLLM's engine in model.json: which there are, who may set them, and their types.

engine_options.json has the arguments of the pinned vLLM; tools/engine_options.py writes it.
"""

import difflib
import functools
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson

from app.core.errors import FieldError, InvalidRequestError
from app.inference.engine_policy import FREE, GUARDED, NARROWED, OWNED

Access = Literal["free", "profile", "never"]

MAX_OPTIONS = 100  # of one launch
_MAX_ERRORS = 20
_MAX_TEXT = 1024
_MAX_ITEMS = 256
_MAX_OBJECT_BYTES = 16_384
_MAX_NUMBER = 2**53
_FILE = Path(__file__).with_suffix(".json")
# No path, no address, no expression.
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
_WORDS = {
    "bool": ("true or false", "lists of true or false"),
    "int": ("a whole number", "a list of whole numbers"),
    "float": ("a number", "a list of numbers"),
    "str": ("a text", "a list of texts"),
    "object": ("a JSON object", "a list of JSON objects"),
}


@dataclass(frozen=True, slots=True)
class EngineOption:
    """An argument of the engine.

    `types`: bool, int, float, str, object, or "list of" one of them. `choices`: the values that it
    takes if not `open`; those of a list are its items'. `reason`: why a profile must permit it (or,
    for "free", the values that are not choices), or why no launch may set it.
    """

    name: str
    types: tuple[str, ...]
    choices: tuple[str | int, ...]
    is_open: bool
    default: str | float | bool | None
    access: Access
    reason: str | None
    group: str
    help: str

    def expected(self, *, is_permitted: bool) -> str:
        """The values that it takes, in words; `is_permitted`: by the profile."""
        if self.choices and not (is_permitted and self.is_open):
            what = "a list of" if any(one.startswith("list") for one in self.types) else "one of"
            return f"{what} {', '.join(map(str, self.choices))}"
        if not is_permitted and any("str" in one for one in self.types):
            return "plain names: letters, digits and _.- only"
        return " or ".join(
            _WORDS[one.removeprefix("list of ")]["list" in one] for one in self.types
        )

    def takes(self, value: object, *, is_permitted: bool) -> bool:
        if isinstance(value, list):
            items = [one.removeprefix("list of ") for one in self.types if one.startswith("list")]
            return len(value) <= _MAX_ITEMS and all(
                self._takes(item, items, is_permitted) for item in value
            )
        return self._takes(value, self.types, is_permitted)

    def _takes(self, value: object, types: Collection[str], is_permitted: bool) -> bool:
        if not any(_IS[one](value) for one in types if one in _IS):
            return False
        if self.choices and not (is_permitted and self.is_open):
            return value in self.choices
        if not isinstance(value, str):
            return True
        return bool(is_permitted or _PLAIN.fullmatch(value) or value == self.default)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT and value.isprintable()


def _is_object(value: object) -> bool:
    try:
        return isinstance(value, dict) and len(orjson.dumps(value)) <= _MAX_OBJECT_BYTES
    except orjson.JSONEncodeError:
        return False


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_number(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


_IS: Mapping[str, Callable[[object], bool]] = {
    "bool": lambda value: isinstance(value, bool),
    "int": _is_whole,
    "float": _is_number,
    "str": _is_text,
    "object": _is_object,
}


@functools.cache
def engine_options() -> Mapping[str, EngineOption]:
    """All options of the pinned vLLM, by name; those of one group together."""
    known = orjson.loads(_FILE.read_bytes())["options"]
    made = {}
    for group, names in FREE.items():
        for name, text in names.items():
            made[name] = _make(name, known[name], "free", None, group, text)
    for access, table in (("profile", GUARDED), ("never", OWNED)):
        for reason, guarded in table.items():
            for name in guarded:
                made[name] = _make(name, known[name], access, reason, "", "")
    return made


@functools.cache
def vllm_version() -> str:
    return str(orjson.loads(_FILE.read_bytes())["vllm"])


def _make(
    name: str, known: dict[str, Any], access: Any, reason: str | None, group: str, text: str
) -> EngineOption:
    choices, is_open = tuple(known.get("choices", ())), bool(known.get("open"))
    if name in NARROWED:
        some, reason = NARROWED[name]
        choices, is_open = some or choices, True
    default = known.get("default")
    return EngineOption(
        name, tuple(known["types"]), choices, is_open, default, access, reason, group, text
    )


def check_engine_options(
    given: Mapping[str, Any], permitted: Collection[str], field: str = "engine."
) -> dict[str, Any]:
    """The options without nulls. Raises InvalidRequestError that names each wrong one.

    `permitted`: names of options that are not free, but allowed here.
    """
    options = {name: value for name, value in given.items() if value is not None}
    if len(options) > MAX_OPTIONS:
        errors = [FieldError(field.rstrip("."), f"at most {MAX_OPTIONS} options")]
    else:
        found = {name: _problem(name, value, permitted) for name, value in options.items()}
        errors = [
            FieldError(f"{field}{name[:64]}", problem) for name, problem in found.items() if problem
        ][:_MAX_ERRORS]
    if errors:
        detail = " ".join(f"{one.field}: {one.message}." for one in errors[:3])
        raise InvalidRequestError(detail, errors)
    return options


def _problem(name: str, value: object, permitted: Collection[str]) -> str | None:
    option = engine_options().get(name)
    if option is None:
        near = difflib.get_close_matches(name[:64], engine_options(), 3)
        hint = f"; near it: {', '.join(near)}" if near else ""
        return f"is not an option of vLLM {vllm_version()}'s engine{hint}"
    is_permitted = name in permitted
    if option.access == "never" and not is_permitted:
        return f"cannot be set: {option.reason}"
    if option.access == "profile" and not is_permitted:
        return f"needs a profile with engine_options = [{name!r}]: {option.reason}"
    if option.takes(value, is_permitted=is_permitted):
        return None
    problem = f"must be {option.expected(is_permitted=is_permitted)}"
    if option.is_open and option.reason and not is_permitted:
        return f"{problem}; others need a profile with engine_options = [{name!r}]: {option.reason}"
    return problem


def parse_option(text: str) -> tuple[str, Any]:
    """`name=value` as a name and a value of its type, or the text if it has none of them.

    Lists are JSON, or items with commas. Raises ValueError if there is no `=`.
    """
    name, separator, value = text.partition("=")
    name = name.strip().removeprefix("--").replace("-", "_")
    if not separator or not name:
        raise ValueError("must be NAME=VALUE, such as max_num_seqs=64")
    option = engine_options().get(name)
    return name, value if option is None else _parse(value.strip(), option.types)


def _parse(text: str, types: Collection[str]) -> Any:
    lists = [one.removeprefix("list of ") for one in types if one.startswith("list")]
    if "bool" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if not {"int", "float", "object"}.isdisjoint(types) or (lists and text.startswith("[")):
        try:
            return orjson.loads(text)
        except orjson.JSONDecodeError:
            return text
    if lists and "str" not in types:
        return [_parse(item.strip(), lists) for item in text.split(",") if item.strip()]
    return text
