"""The arguments of vLLM's engine: name, JSON types, choices, default.

    .venv-triton/bin/python tools/engine_options.py app/inference/engine_options.json

Runs in Triton's environment. The file has no text of vLLM's: app/inference/engine_policy.py explains the
options.
"""

import builtins
import collections.abc
import dataclasses
import enum
import json
import sys
import types
import typing
from pathlib import Path
from typing import Any

from vllm import __version__
from vllm.engine import arg_utils
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}


class _Unimported:
    """A class that vLLM imports for type checkers alone: its configurations, objects in JSON."""

    def __or__(self, other: Any) -> Any:
        return dict | other

    __ror__ = __or__


class _Names(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return getattr(builtins, name, None) or getattr(typing, name, None) or _Unimported()


def main() -> None:
    arguments = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())._actions
    choices = {one.dest: one.choices for one in arguments if one.choices}
    fields = sorted(dataclasses.fields(AsyncEngineArgs), key=lambda one: one.name)
    options = {one.name: describe(one, choices.get(one.name)) for one in fields}
    lines = [f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in options.items()]
    body = ",\n".join(lines)
    text = f'{{"vllm": {json.dumps(__version__)}, "options": {{\n{body}\n}}}}\n'
    Path(sys.argv[1]).write_text(text)


def describe(field: Any, offered: Any) -> dict[str, Any]:
    """An option. `choices` without `open` are all of its values; those of a list are its items'."""
    found: set[str] = set()
    choices: list[Any] = []
    annotation = field.type
    if isinstance(annotation, str):
        annotation = eval(annotation, {}, _Names(vars(arg_utils)))  # noqa: S307 - vLLM's own source
    collect(annotation, found, choices)
    if found == {"str"} and offered:  # choices that the command line alone has
        choices, found = [one for one in offered if one is not None], {"choice of str"}
    names = sorted({one.replace("choice of ", "") for one in found})
    is_open = bool(choices) and any(one in found for one in ("str", "int", "list of str"))
    default = field.default
    if isinstance(default, enum.Enum):
        default = default.value if isinstance(default, int) else default.name
    if not isinstance(default, (bool, int, float, str)):
        default = None
    option = {"types": names, "choices": choices, "open": is_open or None, "default": default}
    return {key: value for key, value in option.items() if value not in ([], None)}


def collect(annotation: Any, found: set[str], choices: list[Any]) -> None:
    """Add the JSON types and the choices of an annotation; others (functions, classes) have none."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation in _SCALARS:
        found.add(_SCALARS[annotation])
    elif origin is typing.Literal:
        choices += [one for one in inner if one not in choices]
        found.update(f"choice of {_SCALARS[type(one)]}" for one in inner)
    elif origin in (typing.Union, types.UnionType):
        for one in inner:
            collect(one, found, choices)
    elif origin is typing.Annotated:
        collect(inner[0], found, choices)
    elif origin in (list, set, tuple, collections.abc.Sequence):
        items: set[str] = set()
        collect(inner[0], items, choices)
        found.update(f"list of {item}" for item in items)
    elif isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        is_number = issubclass(annotation, int)
        choices += [one.value if is_number else one.name for one in annotation]
        found.add("choice of int" if is_number else "choice of str")
    elif (
        isinstance(annotation, _Unimported)
        or dataclasses.is_dataclass(annotation)
        or (dict in (annotation, origin))
    ):
        found.add("object")


if __name__ == "__main__":
    main()
