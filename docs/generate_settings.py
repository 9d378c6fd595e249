"""Print docs/settings.md, made of `app/core/settings.py` and `app/ui/settings.py`: `make docs-settings` writes it.

Run from the repository's root as `python -m docs.generate_settings`.
"""

import inspect
import re
import sys
from collections.abc import Iterator
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from app.core.settings import LogSettings, Settings
from app.ui.settings import UiSettings

_INTRODUCTION = """# Settings

<!-- Made of app/core/settings.py and app/ui/settings.py by `make docs-settings`: change the descriptions there. -->

API, worker, migrations and web page read their settings from the environment, once, at start. A value out of
its bounds stops the process with a line that names it. `make run` needs none of them: it chooses
the addresses itself and hands the other settings on to the processes it starts.
"""
_UNITS = {"_seconds": "s", "_bytes": "bytes"}
_BOUNDS = {Ge: "≥ {}", Gt: "> {}", Le: "≤ {}", Lt: "< {}"}
_SECTION = re.compile(r"^    # --- (.+?) -+$")
_FIELD = re.compile(r"^    (\w+): ")


def render() -> str:
    """The document's text."""
    parts = [_INTRODUCTION]
    for settings in (Settings, LogSettings, UiSettings):
        for section, names in _sections(settings):
            parts.append(
                f"\n## {section}\n\n| name | default | bounds | meaning |\n|---|---|---|---|\n"
            )
            parts += [_row(name, settings.model_fields[name]) for name in names]
    return "".join(parts)


def _sections(settings: type[BaseSettings]) -> Iterator[tuple[str, list[str]]]:
    """The sections that comments in the class mark, each with its fields."""
    section, names = "", list[str]()
    for line in inspect.getsource(settings).splitlines():
        if mark := _SECTION.match(line):
            if names:
                yield section, names
            section, names = mark[1], []
        elif (field := _FIELD.match(line)) and field[1] in settings.model_fields:
            names.append(field[1])
    yield section, names


def _row(name: str, field: FieldInfo) -> str:
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    default = "**required**" if field.is_required() else _value(field.default, unit)
    if field.default is None:
        default = "none"
    bounds = ", ".join(filter(None, map(_bound, field.metadata)))
    return f"| `{field.alias}` | {default} | {bounds} | {field.description} |\n"


def _value(value: Any, unit: str) -> str:
    if isinstance(value, list):
        value = ",".join(value)
    elif isinstance(value, bool):
        value = str(value).lower()
    elif isinstance(value, float):
        value = f"{value:g}" if value < 1000 else f"{value:.0f}"
    return f"`{value}`" + (f" {unit}" if unit else "")


def _bound(constraint: Any) -> str:
    if isinstance(constraint, MinLen):
        return "not empty"
    for kind, text in _BOUNDS.items():
        if isinstance(constraint, kind):
            return text.format(getattr(constraint, kind.__name__.lower()))
    return ""


if __name__ == "__main__":
    sys.stdout.write(render())
