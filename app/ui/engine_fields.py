"""Fields of the engine's options in the form of a launch: one group of the API's list is one section."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.ui.launch_form import FIELDS, Field, Kind, Section

_OWN = frozenset(field.name for field in FIELDS)  # fields with a place of their own in the form
_PERMITTED = "Permitted by the place"


def sections_of(
    listing: Mapping[str, Any], profiles: Iterable[Mapping[str, Any]]
) -> tuple[Section, ...]:
    """The options that a launch may set: free ones, and those that at least one place permits."""
    places: dict[str, list[str]] = {}
    for profile in profiles:
        for name in profile["engine_options"]:
            places.setdefault(name, []).append(profile["name"])
    groups: dict[str, list[Field]] = {}
    for option in listing["options"]:
        permitting = places.get(option["name"], [])
        if f"engine.{option['name']}" in _OWN or not (option["access"] == "free" or permitting):
            continue
        groups.setdefault(option["group"] or _PERMITTED, []).append(_field(option, permitting))
    return tuple(
        Section(title, tuple(fields), is_advanced=True) for title, fields in groups.items()
    )


def _field(option: Mapping[str, Any], permitting: Sequence[str]) -> Field:
    types = option["types"]
    choices = tuple(map(str, option["choices"]))
    words = [option["help"].rstrip(".")] if option["help"] else []
    if permitting:
        where = f"at {', '.join(permitting)}"
        words.append(f"other values {where}" if option["access"] == "free" else f"only {where}")
    if "object" in types:
        words.append("a JSON object")
    elif any(one.startswith("list") for one in types):
        words.append("separated by commas")
    if option["default"] not in (None, ""):
        words.append(f"default: {json.dumps(option['default'])}")
    elif not words:
        words.append("default: vLLM's")
    text = "; ".join(words)
    if (permitting or any(one.startswith("list") for one in types)) and choices:
        text, choices = f"{text}. Such as {', '.join(choices)}", ()
    if types == ["bool"]:
        choices = ("true", "false")
    help_text = f"{text if option['help'] else text[0].upper() + text[1:]}."
    return Field(f"engine.{option['name']}", option["name"], help_text, _kind(types), choices)


def _kind(types: Sequence[str]) -> Kind:
    if "object" in types:
        return "object"
    if any(one.startswith("list") for one in types):
        return "wholes" if "list of int" in types else "words"
    kinds: dict[str, Kind] = {"bool": "switch", "int": "whole", "float": "number"}
    return kinds.get(types[0], "text")
