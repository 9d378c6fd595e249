"""Prompts of rows: from templates, functions, or the rows themselves."""

import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llm_api_client.errors import ConfigurationError

Prompt = str | list[dict[str, str]]
Template = str | Sequence[Mapping[str, str]] | Callable[[Any], Any] | None
Fill = Callable[[Any], Prompt]


class RowError(Exception):
    """A row that cannot be sent; the message gives the reason."""


def compile_prompt(template: Template | Mapping[str, str]) -> Fill:
    """The function that makes the prompt of a row.

    Args:
        template: a text with `{column}`; the messages of a chat with such texts; a function of the row
            that returns a text or messages; None if the rows are texts or messages.

    Raises:
        ConfigurationError: the template has other things in braces than names of columns.
    """
    if template is None:
        return _itself
    if callable(template):
        return _checked(template)
    if isinstance(template, Mapping):
        raise ConfigurationError("Only with score=, the prompt is a mapping.")
    if isinstance(template, str):
        return compile_text(template)
    parts = [(dict(message), compile_text(message["content"])) for message in template]
    return lambda row: [{**message, "content": fill(row)} for message, fill in parts]


def compile_text(template: str) -> Callable[[Any], str]:
    """The function that makes the text of a row. Raises ConfigurationError."""
    try:
        parsed = list(string.Formatter().parse(template))
    except ValueError as error:
        raise ConfigurationError(
            f"The template is wrong ({error}); write {{{{ and }}}} for braces."
        ) from None
    pieces: list[tuple[str, str | None]] = []
    for literal, name, form, conversion in parsed:
        if name == "" or form or conversion:
            raise ConfigurationError(
                "A template has names of columns in braces; write {{ and }} for braces."
            )
        pieces.append((literal, name))

    def fill(row: Any) -> str:
        if isinstance(row, str):
            row = {"text": row}
        try:
            return "".join(
                literal if name is None else f"{literal}{_cell(row[name], name)}"
                for literal, name in pieces
            )
        except (KeyError, TypeError, IndexError):
            raise RowError(_missing(row, pieces)) from None

    return fill


def _cell(value: Any, name: str) -> Any:
    if value is None or value != value:
        raise RowError(f"the column {name} is empty")
    return value


def _missing(row: Any, pieces: Sequence[tuple[str, str | None]]) -> str:
    if not isinstance(row, Mapping):
        return f"a template needs rows with columns, and this one is of type {type(row).__name__}"
    missing = [name for _, name in pieces if name is not None and name not in row]
    columns = ", ".join(map(str, list(row)[:20]))
    return f"the template names the missing column {', '.join(missing)}; the row has {columns or 'none'}"


def _itself(row: Any) -> Prompt:
    return as_prompt(row, "without a prompt, a row is a text or the messages of a chat")


def _checked(function: Callable[[Any], Any]) -> Fill:
    def fill(row: Any) -> Prompt:
        try:
            value = function(row)
        except Exception as error:
            raise RowError(
                f"the prompt's function raised {type(error).__name__}: {error}"
            ) from error
        return as_prompt(
            value, "the prompt's function must return a text or the messages of a chat"
        )

    return fill


def as_prompt(value: Any, advice: str) -> Prompt:
    """The value if it is a prompt."""
    if isinstance(value, str):
        return value
    if isinstance(value, Sequence) and value and all(isinstance(one, Mapping) for one in value):
        return [dict(one) for one in value]
    raise RowError(advice)
