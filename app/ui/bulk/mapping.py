"""Mapping of a row to a request of `POST /results/`, as a person chose the columns."""

import math
import re
from collections.abc import Collection, Mapping as MappingOf, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.ui.bulk.delimited import Row
from app.ui.errors import EntryError

CHAT, COMPLETION, SCORE = "chat", "completion", "score"
MAX_ID = 255  # characters of a row's key
MAX_TEMPLATE = 100_000  # characters
MAX_TEXT = 2_000_000  # characters that a template makes of a row
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_BRACES = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|[{}]")
_PROMPT_NAMES = (
    "prompt", "messages", "question", "input", "instruction", "text", "user", "content", "message",
)  # fmt: skip
_DOCUMENT_NAMES = ("documents", "passages", "document", "passage")
_ID_NAMES = ("id", "custom_id", "key", "uuid")


class RowError(ValueError):
    """A row that makes no request."""


@dataclass(slots=True, frozen=True)
class Parameter:
    """A number that a request may have, within the API's bounds."""

    low: float
    high: float
    is_whole: bool = False

    def read(self, name: str, value: Any) -> int | float:
        """The number in a cell, or in JSON. Raises ValueError with a message for people."""
        try:
            number = _number(value)
            if self.is_whole and isinstance(number, float):
                if not number.is_integer():
                    raise ValueError(value)
                number = int(number)
        except ValueError:
            noun = "a whole number" if self.is_whole else "a number, with a point: 0.5"
            words = f"{name} must be {noun}, not “{text_of(value)[:40]}”."
            raise ValueError(words) from None
        if not self.low <= number <= self.high:
            raise ValueError(f"{name} must be from {self.low:,} to {self.high:,}, not {number}.")
        return number


def _number(value: Any) -> int | float:
    """Raises ValueError for other values, NaN and the infinities."""
    is_number = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_number or "_" in str(value):  # Python would read 1_000
        raise ValueError(value)
    try:
        return int(value) if isinstance(value, str | int) else value
    except ValueError:
        number = float(value)
    if not math.isfinite(number):
        raise ValueError(value)
    return number


PARAMETERS = {
    "max_tokens": Parameter(1, 1_000_000, is_whole=True),
    "temperature": Parameter(0, 2),
    "top_p": Parameter(1e-9, 1),
    "top_k": Parameter(-1, 1_000_000, is_whole=True),
    "min_p": Parameter(0, 1),
    "seed": Parameter(-(2**63), 2**63 - 1, is_whole=True),
    "presence_penalty": Parameter(-2, 2),
    "frequency_penalty": Parameter(-2, 2),
    "repetition_penalty": Parameter(1e-9, 100),
}


@dataclass(slots=True, frozen=True)
class Template:
    """A text with columns in it: pairs of the text before and the column."""

    parts: Sequence[tuple[str, str | None]]

    @property
    def only_column(self) -> str | None:
        is_alone = len(self.parts) == 1 and not self.parts[0][0]
        return self.parts[0][1] if is_alone else None

    def fill(self, row: Row) -> str:
        """The text for a row. Raises RowError for an absent column, and for a text that is too long."""
        texts, length = [], 0
        for before, column in self.parts:
            text = before if column is None else before + text_of(_value(row, column))
            texts.append(text)
            length += len(text)
            # Checked before the join: a template may name a long cell many times.
            if length > MAX_TEXT:
                raise RowError(f"The template makes more than {MAX_TEXT:,} characters of this row.")
        return "".join(texts)


def parse_template(text: str, columns: Collection[str], control: str) -> Template:
    """Parse a text with columns' names in braces; `{{` and `}}` are braces. Raises EntryError."""
    if len(text) > MAX_TEMPLATE:
        raise EntryError(control, f"At most {MAX_TEMPLATE:,} characters.")
    parts: list[tuple[str, str | None]] = []
    before, place = "", 0
    for found in _BRACES.finditer(text):
        before += text[place : found.start()]
        place = found.end()
        if found[0] in ("{{", "}}"):
            before += found[0][0]
        elif found[1] in columns:
            parts.append((before, found[1]))
            before = ""
        else:
            known = ", ".join(f"{{{column}}}" for column in list(columns)[:20])
            raise EntryError(
                control,
                f"“{found[0][:60]}” names no column of the file. It has {known}. "
                "Write {{ and }} for braces that stay as they are.",
            )
    if before + text[place:]:
        parts.append((before + text[place:], None))
    return Template(parts)


@dataclass(slots=True, frozen=True)
class Mapping:
    """Roles of the columns. Numbers of a row's own cells take precedence over those for all rows."""

    kind: str  # CHAT, COMPLETION or SCORE
    prompt: Template  # of a score: the query
    system: Template | None = None
    documents: str | None = None  # their column
    id_column: str | None = None
    model: str | None = None
    model_column: str | None = None
    values: MappingOf[str, int | float] = field(default_factory=dict)
    columns: MappingOf[str, str] = field(default_factory=dict)  # of parameters

    def id_of(self, row: Row) -> str:
        """The row's key: its own, or its line's number. Raises RowError."""
        if self.id_column is None:
            return f"line-{row.line}"
        text = text_of(_value(row, self.id_column)).strip()
        if not text or len(text) > MAX_ID or _CONTROL.search(text):
            raise RowError(
                f"The id in “{self.id_column}” must have 1 to {MAX_ID} characters, and no control "
                "characters."
            )
        return text

    def request_of(self, row: Row) -> dict[str, Any]:
        request: dict[str, Any] = {"model": self._model(row)}
        if self.kind == CHAT:
            request["messages"] = self._messages(row)
        elif self.kind == SCORE:
            return request | {"messages": self._ranking(row), "score": {}}
        else:
            request["content"] = self._text(row)
        parameters: dict[str, int | float] = dict(self.values)
        for name, column in self.columns.items():
            value = row.values.get(column)
            if value is None or (isinstance(value, str) and not value.strip()):
                continue
            try:
                parameters[name] = PARAMETERS[name].read(name, value)
            except ValueError as error:
                raise RowError(f"Column “{column}”: {error}") from None
        if parameters:
            request["parameters"] = parameters
        return request

    def _model(self, row: Row) -> str:
        own = row.values.get(self.model_column) if self.model_column else None
        model = text_of(own).strip() or self.model
        if not model:
            raise RowError("The row names no model, and there is none for all rows.")
        return model

    def _messages(self, row: Row) -> list[Any]:
        system = self.system.fill(row) if self.system else ""
        before = [{"role": "system", "content": system}] if system.strip() else []
        column = self.prompt.only_column
        if column is not None and isinstance(messages := _value(row, column), list):
            return before + messages
        return [*before, {"role": "user", "content": self._text(row)}]

    def _ranking(self, row: Row) -> list[dict[str, str]]:
        """The query, and its documents."""
        assert self.documents is not None
        texts = _listed(_value(row, self.documents))
        if not texts or not all(isinstance(one, str) for one in texts):
            raise RowError(f"“{self.documents}” must be a text or a list of texts.")
        return [
            {"role": "query", "content": self._text(row)},
            *({"role": "document", "content": one} for one in texts),
        ]

    def _text(self, row: Row) -> str:
        text = self.prompt.fill(row)
        if not text.strip():
            raise RowError("The prompt is empty.")
        return text


def to_request(row: Row, mapping: Mapping) -> tuple[str, dict[str, Any]]:
    """A row's key and its request. Raises RowError."""
    return mapping.id_of(row), mapping.request_of(row)


def read_mapping(form: MappingOf[str, str], columns: Collection[str]) -> Mapping:
    def column(control: str) -> str | None:
        name = form.get(control) or None
        if name is not None and name not in columns:
            raise EntryError(control, f"The file has no column “{name[:60]}”.")
        return name

    kind = form.get("kind", CHAT)
    if kind not in (CHAT, COMPLETION, SCORE):
        raise EntryError("kind", f"Must be {CHAT}, {COMPLETION} or {SCORE}.")
    documents = column("documents")
    if (documents is None) == (kind == SCORE):
        words = (
            "Choose the column with the documents." if kind == SCORE else "Only a score has them."
        )
        raise EntryError("documents", words)
    values = _read_values(form)
    columns_of = {name: found for name in PARAMETERS if (found := column(f"{name}_column"))}
    if kind == SCORE and (given := [*values, *(f"{name}_column" for name in columns_of)]):
        raise EntryError(given[0], "A score takes no parameters: leave it empty.")
    template, prompt = form.get("template", ""), column("prompt")
    if not template.strip() and prompt is None:
        raise EntryError("prompt", "Choose the column with the prompts, or write a template.")
    system = form.get("system", "")
    if system.strip() and kind != CHAT:
        raise EntryError("system", "Only a chat has a system message.")
    model = form.get("model", "").strip()
    if len(model) > 256:
        raise EntryError("model", "At most 256 characters.")
    if not model and not form.get("model_column"):
        raise EntryError("model", "Choose a model, or a column with models.")
    return Mapping(
        kind=kind,
        prompt=parse_template(template, columns, "template")
        if template.strip()
        else Template([("", prompt)]),
        system=parse_template(system, columns, "system") if system.strip() else None,
        documents=documents,
        id_column=column("id"),
        model=model or None,
        model_column=column("model_column"),
        values=values,
        columns=columns_of,
    )


def _read_values(form: MappingOf[str, str]) -> dict[str, int | float]:
    values = {}
    for name, parameter in PARAMETERS.items():
        if text := form.get(name, "").strip():
            try:
                values[name] = parameter.read(name, text)
            except ValueError as error:
                raise EntryError(name, str(error)) from None
    return values


def guess_form(columns: Sequence[str]) -> dict[str, str]:
    by_name = {column.strip().lower(): column for column in reversed(columns)}
    prompt = next((by_name[name] for name in _PROMPT_NAMES if name in by_name), None)
    guess = {"prompt": prompt or (columns[0] if len(columns) == 1 else "")}
    if found := next((by_name[name] for name in _ID_NAMES if name in by_name), None):
        guess["id"] = found
    if "model" in by_name:
        guess["model_column"] = by_name["model"]
    for name in ("system", "system_prompt"):
        if name in by_name:
            guess["system"] = "{" + by_name[name] + "}"
    documents = next((by_name[name] for name in _DOCUMENT_NAMES if name in by_name), None)
    if documents is not None and "query" in by_name:
        return guess | {"kind": SCORE, "prompt": by_name["query"], "documents": documents}
    guess |= {f"{name}_column": by_name[name] for name in PARAMETERS if name in by_name}
    return {name: value for name, value in guess.items() if value}


def text_of(value: Any) -> str:
    """A value in a prompt: a text unchanged, null as "", else its JSON. Raises RowError."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    try:
        return orjson.dumps(value).decode()
    except (TypeError, ValueError):  # orjson reads deeper nesting than it writes
        raise RowError("The row is nested too deep.") from None


def _listed(value: Any) -> list[Any]:
    """Documents: of JSON lines a list or a text; of a table's cell a JSON list of texts, or one text."""
    if isinstance(value, str) and value.startswith("["):
        try:
            found = orjson.loads(value)
        except ValueError:
            return [value]
        return found if all(isinstance(one, str) for one in found) else [value]
    return value if isinstance(value, list) else [value]


def _value(row: Row, column: str) -> Any:
    try:
        return row.values[column]
    except KeyError:
        raise RowError(f"The line has no “{column}”.") from None
