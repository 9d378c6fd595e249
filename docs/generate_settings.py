"""Print docs/settings.md, made of `app/core/settings/` and `app/ui/settings.py`: `make docs-settings` writes it.

Run from the repository's root as `python -m docs.generate_settings`.
"""

import sys
from typing import Any

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import AliasChoices
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings

from app.core.settings import Settings
from app.core.settings.observability import LogSettings
from app.ui.settings import UiSettings

_INTRODUCTION = """# Settings

<!-- Made of app/core/settings/ and app/ui/settings.py by `make docs-settings`: change the descriptions there. -->

API, worker, migrations and web page read their settings from the environment, once, at start. A value out of
its bounds stops the process with a line that names it. `make run` needs none of them: it chooses
the addresses itself and hands the other settings on to the processes it starts.
"""
_UNITS = {"_seconds": "s", "_bytes": "bytes"}
_BOUNDS = {Ge: "≥ {}", Gt: "> {}", Le: "≤ {}", Lt: "< {}"}


def render() -> str:
    """The document's text."""
    parts = [_INTRODUCTION]
    for section in (*Settings.__bases__, LogSettings, UiSettings):
        assert issubclass(section, BaseSettings)
        title = section.model_config["title"]
        parts.append(f"\n## {title}\n\n| name | default | bounds | meaning |\n|---|---|---|---|\n")
        parts += [_row(name, field) for name, field in section.model_fields.items()]
    return "".join(parts)


def _row(name: str, field: FieldInfo) -> str:
    unit = next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")
    default = "**required**" if field.is_required() else _value(field.default, unit)
    if field.default is None:
        default = "none"
    bounds = ", ".join(filter(None, map(_bound, field.metadata)))
    meaning = " ".join((field.description or "").split())
    return f"| `{field.alias}` | {default} | {bounds} | {meaning}{_old_names(field)} |\n"


def _old_names(field: FieldInfo) -> str:
    if not isinstance(field.validation_alias, AliasChoices):
        return ""
    _, *old = field.validation_alias.choices
    return f" Old name, still accepted: {', '.join(f'`{name}`' for name in old)}."


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
