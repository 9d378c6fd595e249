"""Chat templates: Jinja, with the variables, filters and extensions that transformers provides.

Templates come from the operator's models, never from a request. They run in an immutable sandbox, with
a bounded output. Source: https://huggingface.co/docs/transformers/chat_templating.
"""

import json
import time
from collections.abc import Mapping
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Messages = list[dict[str, Any]]

MAX_SECONDS = 5.0  # of CPU time
_MAX_CHARACTERS = 4_000_000
# Marks the end of a message that is to be continued, in the rendered text.
_CONTINUE_HERE = "CONTINUE_FINAL_MESSAGE_TAG "


def read_templates(weights: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The model's templates by name: `default`, and `tool_use` if requests with tools have their own."""
    file = weights / "chat_template.jinja"
    given = file.read_text() if file.is_file() else config.get("chat_template")
    if isinstance(given, list):  # several named templates
        sources = {item["name"]: item["template"] for item in given}
    else:
        sources = {"default": given} if given else {}
    for further in (weights / "additional_chat_templates").glob("*.jinja"):
        sources[further.stem] = further.read_text()
    return sources


def compile_template(source: str | None) -> jinja2.Template | None:
    return _ENVIRONMENT.from_string(source) if source else None


def uses_variable(source: str, name: str) -> bool:
    return name in meta.find_undeclared_variables(_ENVIRONMENT.parse(source))


def render(template: jinja2.Template, messages: Messages, variables: dict[str, Any]) -> str:
    """Messages as text. `continue_final_message` leaves the last one open. Raises any exception."""
    if not variables.pop("continue_final_message", False):
        return _to_text(template, messages, variables)
    if variables["add_generation_prompt"]:
        raise ValueError("to continue the final message, set add_generation_prompt to false")
    marked = deepcopy(messages)
    final = marked[-1].get("content")
    if not isinstance(final, str):
        raise TypeError("the final message has no content to continue")
    marked[-1]["content"] = final + _CONTINUE_HERE
    text = _to_text(template, marked, variables)
    end = text.rfind(_CONTINUE_HERE.strip())
    if end < 0 or final.strip() not in text:
        raise ValueError("the template changes the final message: it cannot be continued")
    is_trimmed = not text.startswith(_CONTINUE_HERE, end)
    return text[:end].rstrip() if is_trimmed else text[:end]


def _to_text(template: jinja2.Template, messages: Messages, variables: dict[str, Any]) -> str:
    pieces, size = [], 0
    ends = time.thread_time() + MAX_SECONDS  # frees the thread, although its client was refused
    for piece in template.generate(variables, messages=messages):
        size += len(piece)
        if size > _MAX_CHARACTERS:
            raise ValueError(f"more than {_MAX_CHARACTERS} characters")
        if time.thread_time() > ends:
            raise TimeoutError
        pieces.append(piece)
    return "".join(pieces)


class _GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text and does not change it.

    As in transformers, it is a call block: variables set inside are not visible outside.
    """

    tags = {"generation"}  # noqa: RUF012 # as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("emit"), [], [], body).set_lineno(line)

    def emit(self, caller: Macro) -> str:
        return str(caller())


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter `tojson` with transformers' arguments and defaults: Jinja's own escapes HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_GenerationBlock, loopcontrols],
    autoescape=False,  # the text is a prompt, never a page
)
_ENVIRONMENT.filters["tojson"] = _to_json
_ENVIRONMENT.globals["raise_exception"] = _raise_exception
_ENVIRONMENT.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
