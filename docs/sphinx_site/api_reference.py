"""The reference of the API as Markdown, made of its OpenAPI document."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.api.app import create_app
from app.core.settings import Settings

_INTRODUCTION = """# API reference

Every route, made of the OpenAPI document that a running service has at `/openapi.json` (and, to try it, at
`/docs`).
"""
_TITLES = {
    "infini-gram": "infini-gram",
    "openai": "OpenAI",
    "tgi": "Text Generation Inference",
    "tenstorrent": "Tenstorrent",
}


def render() -> str:
    """The document's text."""
    document = create_app(_settings()).openapi()
    groups: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            tag = (operation.get("tags") or ["other"])[0]
            groups.setdefault(tag, []).append(_route(method, path, operation, document))
    parts = [_INTRODUCTION]
    for tag, routes in groups.items():
        parts.append(f"## {_TITLES.get(tag, tag.capitalize())}")
        parts += routes
    return "\n\n".join(parts) + "\n"


def _settings() -> Settings:
    """The document depends on none of them."""
    names = (
        "LLM_DATABASE_URL",
        "LLM_DATABASE_ADMIN_USER",
        "LLM_DATABASE_PASSWORD",
        "LLM_DATABASE_DB",
    )
    return Settings.model_validate(dict.fromkeys(names, "unused"))


def _route(method: str, path: str, operation: Mapping[str, Any], document: Any) -> str:
    parts = [f"### `{method.upper()} {path}`", operation.get("description", "")]
    parameters = operation.get("parameters", [])
    if parameters:
        rows = (_parameter(one) for one in parameters)
        parts.append("\n".join(["| parameter | in | type | meaning |", "|---|---|---|---|", *rows]))
    body = operation.get("requestBody", {}).get("content", {})
    for media, content in body.items():
        parts.append(f"Body (`{media}`):")
        parts.append(_members(content.get("schema", {}), document))
        if "example" in content:
            parts.append(f"```json\n{json.dumps(content['example'], indent=2)}\n```")
    answers = [
        f"| {status} | {_cell(answer.get('description', ''))} |"
        for status, answer in operation["responses"].items()
    ]
    parts.append("\n".join(["| answer | |", "|---|---|", *answers]))
    return "\n\n".join(part for part in parts if part)


def _parameter(one: Mapping[str, Any]) -> str:
    name = f"`{one['name']}`" + (" (required)" if one.get("required") else "")
    meaning = _cell(one.get("description") or one["schema"].get("description", ""))
    return f"| {name} | {one['in']} | {_cell(_type(one['schema']))} | {meaning} |"


def _members(schema: Mapping[str, Any], document: Any) -> str:
    """The members of a body, of each of its forms."""
    tables = []
    for form in _forms(schema, document):
        required = form.get("required", ())
        rows = [
            f"| `{name}`{' (required)' if name in required else ''} | {_cell(_type(member))} "
            f"| {_cell(member.get('description', ''))} |"
            for name, member in form.get("properties", {}).items()
        ]
        if rows:
            tables.append("\n".join(["| member | type | meaning |", "|---|---|---|", *rows]))
    return "\n\nor\n\n".join(tables)


def _forms(schema: Mapping[str, Any], document: Any) -> Iterator[Mapping[str, Any]]:
    if "$ref" in schema:
        yield from _forms(_resolve(schema["$ref"], document), document)
        return
    options = schema.get("anyOf") or schema.get("oneOf")
    for option in options or ():
        yield from _forms(option, document)
    if not options:
        yield schema


def _resolve(reference: str, document: Any) -> Mapping[str, Any]:
    target: Any = document
    for part in reference.removeprefix("#/").split("/"):
        target = target[part]
    found: Mapping[str, Any] = target
    return found


def _type(schema: Mapping[str, Any]) -> str:
    """A short name of what may stand there."""
    if "$ref" in schema:
        return str(schema["$ref"]).rsplit("/", 1)[1]
    for joined in ("anyOf", "oneOf"):
        if joined in schema:
            names = dict.fromkeys(_type(option) for option in schema[joined])
            return " or ".join(name for name in names if name != "null")
    if "enum" in schema:
        return ", ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}))}"
    low, high = schema.get("minimum"), schema.get("maximum")
    bounds = f" {low:g} to {high:g}" if low is not None and high is not None else ""
    return f"{schema.get('type', 'any')}{bounds}"


def _cell(text: str) -> str:
    return " ".join(str(text).split()).replace("|", "\\|")
