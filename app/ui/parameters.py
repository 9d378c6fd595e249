"""The sampling parameters as controls of a form: bounds from the API's own document, texts from here.

The API's OpenAPI document lists the parameters with types and bounds, so a new one appears by itself;
the trade-offs are described here.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.ui.api import Api
from app.ui.errors import FormError

Kind = Literal["integer", "number", "boolean", "lines", "integers", "object", "structure"]

# A line of advice for each, and its group.
_GROUPS = ("Length", "Randomness", "Repetition", "Stopping", "Structure", "More")
_ADVICE: Mapping[str, tuple[str, str]] = {
    "max_tokens": ("Length", "More allows longer answers; each token takes time."),
    "min_tokens": ("Length", "Forces longer answers, at the price of padding."),
    "ignore_eos": ("Length", "Always runs to max_tokens; for measuring speed, not for good text."),
    "temperature": (
        "Randomness",
        "Low: the likely, repeatable words. High: variety, and mistakes.",
    ),
    "top_p": ("Randomness", "Lower cuts off unlikely words: safer text, less variety."),
    "top_k": ("Randomness", "Fewer candidates: safer text, less variety."),
    "min_p": (
        "Randomness",
        "Higher drops more of the unlikely words, the more so where one is sure.",
    ),
    "seed": ("Randomness", "The same seed and request repeat the same text."),
    "presence_penalty": ("Repetition", "Higher brings new topics; too high leaves the subject."),
    "frequency_penalty": ("Repetition", "Higher repeats words less; too high twists the grammar."),
    "repetition_penalty": ("Repetition", "Above 1 breaks loops; too high avoids needed words."),
    "stop": (
        "Stopping",
        'Ends early at one of these texts, one a line (or a JSON list: ["\\n\\n"]); saves time.',
    ),
    "stop_token_ids": ("Stopping", "Ends at one of these token ids, separated by commas."),
    "bad_words": ("Stopping", "Never uses these words, one a line; the text may paraphrase them."),
    "allowed_token_ids": ("More", "Uses these token ids alone; too few of them make poor text."),
    "include_stop_str_in_output": ("Stopping", "Keeps the stop text at the end of the answer."),
    "structured_outputs": (
        "Structure",
        "Guarantees the form of the answer; slower, and a tight form can reduce its quality.",
    ),
    "logprobs": ("More", "Stores this many likely tokens at each position; makes results larger."),
    "prompt_logprobs": (
        "More",
        "Stores this many likely tokens at each position of the prompt; makes results larger.",
    ),
    "logit_bias": ("More", 'Pushes single token ids up or down; JSON such as {"42": -100}.'),
    "skip_special_tokens": ("More", "No shows the model's control tokens in the text."),
    "spaces_between_special_tokens": ("More", "Readable control tokens against exact text."),
}
_LABELS = {
    "ignore_eos": "Ignore end of sequence",
    "include_stop_str_in_output": "Include stop text in the answer",
    "stop": "Stop texts",
    "stop_token_ids": "Stop token ids",
}
_HIDDEN = frozenset({"n"})  # one result is one generation
_STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")


@dataclass(frozen=True, slots=True)
class Parameter:
    """One control: its name, type and bounds, its description, and its trade-off."""

    name: str
    kind: Kind
    group: str
    description: str
    trade: str
    minimum: float | None = None
    maximum: float | None = None
    is_above: bool = False  # the minimum itself is not allowed
    default: Any = None  # the service's default; None: the engine's

    @property
    def label(self) -> str:
        return _LABELS.get(self.name) or self.name.replace("_", " ").capitalize()

    @property
    def bounds(self) -> str:
        """The bounds as `From 0 to 1.`; empty without bounds that matter."""
        if self.minimum is None or self.maximum is None:
            return ""
        if max(abs(self.minimum), abs(self.maximum)) > 2**53:
            return ""
        if self.is_above:
            return f"Above {self.minimum:,g}, at most {self.maximum:,.10g}."
        return f"From {self.minimum:,g} to {self.maximum:,.10g}."


async def read_parameters(api: Api) -> list[tuple[str, list[Parameter]]]:
    document = await api.get_public("/openapi.json")
    properties = document["components"]["schemas"]["SamplingParameters"]["properties"]
    parameters = [
        _parameter(name, schema) for name, schema in properties.items() if name not in _HIDDEN
    ]
    order = list(_ADVICE)
    parameters.sort(key=lambda one: order.index(one.name) if one.name in order else len(order))
    groups = [(group, [one for one in parameters if one.group == group]) for group in _GROUPS]
    return [(group, found) for group, found in groups if found]


def flat(groups: Iterable[tuple[str, Iterable[Parameter]]]) -> list[Parameter]:
    return [one for _, group in groups for one in group]


def parse_parameters(
    parameters: Iterable[Parameter], form: Mapping[str, str], prefix: str = "p."
) -> dict[str, Any]:
    """The entered parameters, in the API's format; the API checks their bounds. Raises FormError."""
    values: dict[str, Any] = {}
    wrong: list[tuple[str, str]] = []
    for parameter in parameters:
        text = form.get(prefix + parameter.name, "").replace("\r\n", "\n")
        kind = form.get(f"{prefix}{parameter.name}.kind", "")
        try:
            value = _parse(parameter, text, kind)
        except ValueError as error:
            wrong.append((parameter.name, str(error)))
        else:
            if value is not None:
                values[parameter.name] = value
    if wrong:
        raise FormError(wrong)
    return values


def model_of(result: Mapping[str, Any]) -> str:
    """The name by which a result's model was requested, with its adapter."""
    name, adapter = result["model_name"], result["parameters"].get("lora_name")
    return f"{name}:{adapter}" if adapter else str(name)


def without_adapter(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A result's parameters as a request takes them: the model's name has the adapter."""
    return {name: value for name, value in parameters.items() if name != "lora_name"}


def as_entered(
    result: Mapping[str, Any],
    parameters: Iterable[Parameter],
    models: Iterable[Mapping[str, Any]],
) -> dict[str, Any]:
    """A result's parameters without a `max_tokens` that is only the default's value.

    It is always stored. If it was entered again, it would not shrink as a chat grows, and would refuse
    the chat's next message.
    """
    values = without_adapter(result["parameters"])
    default = next((one.default for one in parameters if one.name == "max_tokens"), None)
    stored = values.get("max_tokens")
    if stored is None or default is None:
        return values
    length = next(
        (one["max_model_len"] for one in models if one["name"] == result["model_name"]), 0
    )
    filled = (result["usage"] or {}).get("prompt_tokens", 0) + stored
    if stored == default or (stored < default and filled == length):
        del values["max_tokens"]
    return values


def to_form(values: Mapping[str, Any], prefix: str = "p.") -> dict[str, str]:
    """The inverse of `parse_parameters`."""
    form: dict[str, str] = {}
    for name, value in values.items():
        if name == "structured_outputs" and isinstance(value, Mapping) and value:
            structure, content = next((k, v) for k, v in value.items() if v is not None)
            form[f"{prefix}{name}.kind"] = structure
            if structure == "choice":
                form[prefix + name] = _of_lines(content)
            elif structure != "json_object":
                form[prefix + name] = content if isinstance(content, str) else json.dumps(content)
        elif isinstance(value, bool):
            form[prefix + name] = str(value).lower()
        elif isinstance(value, list):
            is_text = any(isinstance(one, str) for one in value)
            form[prefix + name] = _of_lines(value) if is_text else ", ".join(map(str, value))
        elif isinstance(value, Mapping):
            form[prefix + name] = json.dumps(value)
        elif isinstance(value, float) and value.is_integer():
            form[prefix + name] = str(int(value))  # 0 as it was entered, not 0.0
        elif value is not None:
            form[prefix + name] = str(value)
    return form


def _parameter(name: str, schema: Mapping[str, Any]) -> Parameter:
    kind, found = _kind(name, schema)
    group, trade = _ADVICE.get(name, ("More", ""))
    return Parameter(
        name,
        kind,
        group,
        str(schema.get("description", "")),
        trade,
        minimum=found.get("exclusiveMinimum", found.get("minimum")),
        maximum=found.get("exclusiveMaximum", found.get("maximum")),
        is_above="exclusiveMinimum" in found,
        default=schema.get("default"),
    )


def _kind(name: str, schema: Mapping[str, Any]) -> tuple[Kind, Mapping[str, Any]]:
    """The type of control, and the part of the schema that has its bounds."""
    if name == "structured_outputs":
        return "structure", schema
    kinds: dict[str, Kind] = {"integer": "integer", "number": "number", "boolean": "boolean"}
    options = schema.get("anyOf", [schema])
    for option in options:
        if option.get("type") in kinds:
            return kinds[option["type"]], option
        if option.get("type") == "array":
            return ("integers" if option["items"].get("type") == "integer" else "lines"), option
    return "object", schema


def _parse(parameter: Parameter, text: str, structure: str) -> Any:
    """A value; None for an empty entry. Raises ValueError with a message for people."""
    if parameter.kind == "structure":
        return _parse_structure(structure, text)
    if not text.strip():
        return None
    return _PARSERS[parameter.kind](text if parameter.kind == "lines" else text.strip())


def _parse_structure(structure: str, text: str) -> dict[str, Any] | None:
    if not structure:
        return None
    if structure not in _STRUCTURES:
        raise ValueError("must be one of " + ", ".join(_STRUCTURES))
    if structure == "json_object":
        return {structure: True}
    if not text.strip():
        raise ValueError(f"enter the {structure}, or choose none")
    if structure == "json":
        return {structure: _json(text)}
    if structure == "choice":
        return {structure: _lines(text)}
    return {structure: text}


def _lines(text: str) -> list[str]:
    """Texts, one a line; those that have line ends themselves come as a JSON list."""
    if text.strip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, list) and all(isinstance(one, str) for one in values):
            return values
    return [line for line in text.split("\n") if line]


def _of_lines(values: list[str]) -> str:
    """The inverse of `_lines`."""
    text = "\n".join(values)
    return (
        text if text.strip() and _lines(text) == values else json.dumps(values, ensure_ascii=False)
    )


def _integer(text: str) -> int:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text.strip()):
        raise ValueError("must be a whole number")
    return int(text)


def _number(text: str) -> float:
    if not re.fullmatch(
        r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]{1,3})?", text, re.IGNORECASE
    ):
        raise ValueError("must be a number")
    number = float(text)
    if not math.isfinite(number):
        raise ValueError("is too large")
    return number


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error


_PARSERS: Mapping[Kind, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": lambda text: text == "true",
    "lines": _lines,
    "integers": lambda text: [_integer(part) for part in re.split(r"[,\s]+", text.strip(", "))],
    "object": _json,
}
