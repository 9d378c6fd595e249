"""The reference of the Python client as Markdown, made of its docstrings and signatures."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import msgspec

import llm_api_client
from llm_api_client import client, errors, schemas

_INTRODUCTION = """# Reference of the Python client

Every class and method of `llm_api_client`, made of its docstrings. `AsyncClient` has the same methods, to be awaited or
iterated with `async for`. [Guide](client.md).
"""
_GROUPS = {
    "contexts": client.Contexts,
    "models": client.Models,
    "jobs": client.Jobs,
    "attributions": client.Attributions,
    "servers": client.Servers,
    "launches": client.Launches,
    "webhooks": client.Webhooks,
}
_MODULE = re.compile(r"\b(?:[a-z_]+\.)+(?=[A-Z])")
_QUOTED = re.compile(r"'([A-Z]\w*)'")
_SECTION = re.compile(r"^(Args|Raises|Returns|Attributes):$", re.MULTILINE)
_NAMED = re.compile(r"^ {4}(\w+): ", re.MULTILINE)


def render() -> str:
    """The document's text."""
    parts = [_INTRODUCTION, "## Client", _prose(client.Client)]
    parts += _methods("client", client.Client)
    for name, group in _GROUPS.items():
        parts += [f"## client.{name}", _prose(group), *_methods(f"client.{name}", group)]
    parts += ["## Streams", _prose(llm_api_client.Stream)]
    parts += _methods("stream", llm_api_client.Stream)
    parts += ["### StreamEvent", _prose(llm_api_client.StreamEvent)]
    parts += ["## Jobs", _prose(llm_api_client.Job), *_methods("job", llm_api_client.Job)]
    parts += ["### Row", _prose(llm_api_client.Row), *_methods("row", llm_api_client.Row)]
    parts += ["## Functions", *_function("", llm_api_client.verify_webhook)]
    parts.append("## Records")
    for record in [*_classes(schemas, msgspec.Struct), llm_api_client.JobInfo]:
        parts += [f"### {record.__name__}", _prose(record), _members(record)]
    parts.append("## Errors")
    rows = (llm_api_client.RowFailedError, llm_api_client.OutputError)
    for error in [*_classes(errors, errors.LLMAPIError), *rows]:
        parts += [f"### {error.__name__}({error.__bases__[0].__name__})", _prose(error)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _classes(module: Any, base: type) -> Iterator[type]:
    """The public classes that a module defines."""
    for name, value in vars(module).items():
        is_own = isinstance(value, type) and value.__module__ == module.__name__
        if (
            is_own
            and issubclass(value, base)
            and value is not schemas.Record
            and not name.startswith("_")
        ):
            yield value


def _methods(prefix: str, kind: type) -> Iterator[str]:
    for name, value in vars(kind).items():
        if not name.startswith("_") and (callable(value) or isinstance(value, property)):
            yield from _function(f"{prefix}.", value, name)


def _function(prefix: str, value: Any, name: str = "") -> Iterator[str]:
    name = name or value.__name__
    if isinstance(value, property):
        yield f"### {prefix}{name}"
    else:
        yield f"### {prefix}{name}()"
        signature = inspect.signature(value)
        parameters = [one for one in signature.parameters.values() if one.name != "self"]
        shown = str(signature.replace(parameters=parameters))
        shown = _MODULE.sub("", shown).replace("collections.abc.", "").replace("~", "")
        shown = _QUOTED.sub(r"\1", shown)
        yield f"```text\n{name}{shown}\n```"
    yield _prose(value)


def _prose(value: Any) -> str:
    """A docstring, with its sections as lists."""
    text = inspect.getdoc(value) or ""
    text = _SECTION.sub(r"\n*\1*\n", text)
    text = _NAMED.sub(r"- `\1`: ", text)
    return re.sub(r"^ {8,}|^ {4}", "  ", text, flags=re.MULTILINE)


def _members(record: Any) -> str:
    names = (f"`{field.name}`" for field in msgspec.structs.fields(record))
    return f"Members: {', '.join(names)}."
