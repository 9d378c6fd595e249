"""The form of a launch: its fields with their help, and the request of their values."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from app.ui.errors import EntryError

Kind = Literal["text", "whole", "number", "flag", "words", "switch", "wholes", "object", "pairs"]


class Field(NamedTuple):
    """A field. `name`: the member of the request; a dot leads into an object inside it."""

    name: str
    label: str
    help: str
    kind: Kind = "text"
    choices: tuple[str, ...] = ()


class Section(NamedTuple):
    """Fields under a heading; `is_advanced`: closed while all of them are empty."""

    title: str
    fields: tuple[Field, ...]
    is_advanced: bool = False


MODEL = Field(
    "model",
    "Model",
    "A Hugging Face id (owner/name), or a path below the place's model roots. The list is the "
    "operator's catalogue; any other is accepted, too.",
)
PROFILE = Field(
    "profile",
    "Place",
    "A profile: a cluster, or this machine. Default: the catalogue's choice, else the operator's.",
)
TIER = Field(
    "tier",
    "Size",
    "One of the place's sizes. Default: the smallest that takes the model's weights.",
)
CONTEXT = Field(
    "engine.max_model_len",
    "Context length",
    "Tokens of a request, prompt and answer together. Default: the model's maximum.",
    "whole",
)
_LAUNCH = (
    Field(
        "name",
        "Name of the launch",
        "And of its server. Letters, digits, dots, dashes; taken until the launch has ended.",
    ),
    Field(
        "served_name",
        "Model name in requests",
        "Default: the id without its owner, or the directory's name.",
    ),
    Field(
        "time_limit_minutes",
        "Time limit, minutes",
        "The job ends after this, with all running results. Default: the place's.",
        "whole",
    ),
    Field(
        "idle_minutes",
        "Idle timeout, minutes",
        "It is stopped after this time without a request; 0: never. Default: the place's.",
        "number",
    ),
)
_RESOURCES = (
    Field(
        "resources.nodes",
        "Nodes",
        "Nodes of a cluster for this server, joined by Ray. Default: 1.",
        "whole",
    ),
    Field("resources.gpus", "GPUs", "On each node.", "whole"),
    Field("resources.cpus", "CPU cores", "On each node.", "whole"),
    Field("resources.memory_gb", "Memory, GB", "Memory of each node, not of its GPUs.", "whole"),
    Field(
        "resources.gres",
        "Slurm's gres",
        "Such as gpu:a100:2, to request a kind of GPU. Default: derived from GPUs.",
    ),
)
_SLURM = (
    Field("partition", "Partition", "Default: the size's, or the place's."),
    Field("account", "Account", "Slurm account that is charged. Default: the place's."),
    Field("constraint", "Constraint", "A feature that the node must have, such as gpu80 or a100."),
    Field("modules", "Modules", "Loaded before the server starts; one or several.", "words"),
    Field(
        "priority",
        "Priority",
        "0, or below 0 to let other jobs go first (Slurm's --nice).",
        "whole",
    ),
)
_ENGINE = (
    Field("revision", "Revision", "Branch, tag or commit of a Hugging Face model."),
    Field(
        "engine.dtype",
        "Number type",
        "The type that the model computes in. Default: its own.",
        "text",
        ("bfloat16", "float16", "float32"),
    ),
    Field(
        "engine.quantization",
        "Quantization",
        "fp8 or bitsandbytes compress while loading; others need weights that are compressed so.",
    ),
    Field(
        "engine.gpu_memory_utilization",
        "Share of GPU memory",
        "For weights and cache, above 0 and at most 1. Default: 0.9.",
        "number",
    ),
    Field(
        "adapters",
        "LoRA adapters",
        "As name=place, separated by commas; a place is a path below the model roots, or a Hugging "
        "Face id. Requests name one as model:name.",
        "pairs",
    ),
    Field(
        "start_minutes",
        "Start timeout, minutes",
        "The launch fails if the model is not ready so long after the job's start.",
        "number",
    ),
    Field(
        "provider",
        "Kind of place",
        "Default: the place's. Another kind than the place's is refused.",
        "text",
        ("slurm", "local"),
    ),
    Field(
        "engine.enforce_eager",
        "No CUDA graphs",
        "Starts faster and takes less memory, but answers slower (enforce_eager).",
        "flag",
    ),
    Field(
        "trust_remote_code",
        "Run the model's own Python code",
        "Only if the place allows it: code from a model's repository has all rights of the job.",
        "flag",
    ),
)
SECTIONS = (
    Section("The launch", _LAUNCH),
    Section("Resources instead of the size's", _RESOURCES),
    Section("Slurm", _SLURM, is_advanced=True),
    Section("Engine, and the rest", _ENGINE, is_advanced=True),
)
FIELDS = (MODEL, PROFILE, TIER, CONTEXT, *(field for part in SECTIONS for field in part.fields))
# Only for the plan.
PLAN_NAMES = ("concurrency", "gpu_kinds", "max_nodes", "config")
NAMES = (*(field.name for field in FIELDS), *PLAN_NAMES)


_NUMBERS: Mapping[Kind, Sequence[type[int] | type[float]]] = {
    "whole": (int,),
    "number": (int, float),
}


def to_launch(values: Mapping[str, str], options: Sequence[Section] = ()) -> dict[str, Any]:
    """The body of `POST /launches`: the filled fields. `options`: the engine's."""
    request: dict[str, Any] = {}
    for field in (*FIELDS, *(field for part in options for field in part.fields)):
        text = values.get(field.name, "").strip()
        if not text:
            continue
        place, *inner = field.name.split(".")
        if inner:
            request.setdefault(place, {})[inner[0]] = _value(field.kind, text)
        else:
            request[place] = _value(field.kind, text)
    return request


def to_plan(values: Mapping[str, str]) -> dict[str, Any]:
    """The body of `POST /launches/plan`. Raises EntryError."""
    launch = to_launch(values)
    engine = launch.get("engine", {})
    names = ("dtype", "quantization", "gpu_memory_utilization")
    request: dict[str, Any] = {name: engine.get(name) for name in names} | {
        "context": engine.get("max_model_len"),
        "minutes": launch.get("time_limit_minutes"),
        "concurrency": _value("whole", values["concurrency"].strip()) or None,
        "gpus": _words(values["gpu_kinds"]) or None,
        "max_nodes": _value("whole", values["max_nodes"].strip()) or None,
    }
    if values["config"].strip():
        request["config"] = _object(values["config"])
    else:
        request |= {name: launch.get(name) for name in ("model", "revision", "profile", "provider")}
    return {name: value for name, value in request.items() if value is not None}


def with_plan_row(
    row: Mapping[str, Any],
    model: Mapping[str, Any],
    values: Mapping[str, str],
    profile: Mapping[str, Any] | None,
) -> dict[str, str]:
    """The form's values with the resources of a row of the plan; a time limit and a size are kept."""
    asked = row["resources"]
    minutes = min(asked["minutes"], profile["max_minutes"]) if profile else asked["minutes"]
    tiers = profile["tiers"] if profile else ()
    sizes = [size for size in tiers if takes(size, model, row["nodes"])]
    # The service's own rule: the smallest that has a limit, else one that takes any.
    size = min(sizes, key=lambda one: one["max_model_size_gb"] or float("inf"), default=None)
    return {
        **values,
        "tier": values["tier"] or (size["name"] if size else ""),
        "resources.nodes": str(row["nodes"]) if row["nodes"] > 1 else "",
        "resources.gpus": str(asked["gpus"]),
        "resources.cpus": str(asked["cpu_cores"]),
        "resources.memory_gb": str(asked["memory_gb"]),
        "engine.max_model_len": str(row["context"]),
        "time_limit_minutes": values["time_limit_minutes"] or str(minutes),
    }


def nodes_of(values: Mapping[str, str]) -> int:
    """The nodes of a launch by the form's values; 1 for a text that is no number."""
    number = _value("whole", values["resources.nodes"].strip())
    return max(1, number) if isinstance(number, int) else 1


def takes(size: Mapping[str, Any], model: Mapping[str, Any], nodes: int = 1) -> bool:
    """True if nodes of this size have room for the model's weights."""
    most = size["max_model_size_gb"]
    return most is None or model["disk_bytes"] / nodes / 1e9 <= most


def from_spec(spec: Mapping[str, Any]) -> dict[str, str]:
    inner = {"resources": spec, "engine": spec["engine"]}
    values = {}
    for field in FIELDS:
        place, _, name = field.name.partition(".")
        value = inner[place].get(name) if name else spec.get(place)
        if value is True:
            values[field.name] = "on"
        elif field.kind == "pairs":
            values[field.name] = ", ".join(f"{key}={one}" for key, one in (value or {}).items())
        elif value not in (None, False, []):
            values[field.name] = " ".join(value) if isinstance(value, list) else str(value)
    others = {f"engine.{name}": value for name, value in spec["engine"].items()}
    for name in others.keys() - {field.name for field in FIELDS}:
        values[name] = _text(others[name])
    return values


def _text(value: Any) -> str:
    """The text of an option's value, as its field takes it."""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)


def _value(kind: Kind, text: str) -> Any:
    """A text as its kind of value. An invalid text is sent unchanged: the API reports the error."""
    if kind == "flag":
        return True
    if kind == "words":
        return _words(text)
    if kind == "pairs":
        return {name: place for name, _, place in (word.partition("=") for word in _words(text))}
    if kind == "wholes":
        return [_value("whole", word) for word in _words(text)]
    if kind in ("switch", "object"):
        with contextlib.suppress(ValueError, RecursionError):
            return json.loads(text)
    for number in _NUMBERS.get(kind, ()):
        with contextlib.suppress(ValueError):
            return number(text)
    return text


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _object(text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        message = "The text is not a JSON object: paste the whole config.json."
        raise EntryError("config", message)
    return document
