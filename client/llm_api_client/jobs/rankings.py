"""Queries and documents of rows: the messages of their scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from llm_api_client.errors import ConfigurationError
from llm_api_client.jobs.prompts import Fill, Prompt, RowError, compile_text

Ranking = Mapping[str, str] | Callable[[Any], Any] | None

_COLUMNS = {"query": "{query}", "documents": "{documents}"}
_ADVICE = "the documents must be a text or a list of texts"


def compile_ranking(template: Any) -> Fill:
    """The function that makes the messages of a row: a query, and its documents.

    Args:
        template: templates of `query` and `documents`; `{column}` alone may have a list of documents. A
            function of the row that returns a mapping of both. None: the columns have these names.

    Raises:
        ConfigurationError: the template is neither.
    """
    if template is None:
        template = _COLUMNS
    if callable(template):
        return _of_function(template)
    if not isinstance(template, Mapping) or template.keys() != _COLUMNS.keys():
        raise ConfigurationError(
            "With score=, the prompt is a mapping of `query` and `documents`, a function, or left out."
        )
    query = compile_text(template["query"])
    documents = _compile_documents(template["documents"])
    return lambda row: _messages(query(row), documents(row))


def _compile_documents(template: str) -> Callable[[Any], Any]:
    fill = compile_text(template)
    column = template[1:-1] if template[:1] == "{" and template[-1:] == "}" else ""

    def documents(row: Any) -> Any:
        value: Any = row.get(column) if isinstance(row, Mapping) else None
        if hasattr(value, "tolist"):  # a cell of a data frame
            value = value.tolist()
        return value if isinstance(value, list | tuple) else fill(row)

    return documents


def _of_function(function: Callable[[Any], Any]) -> Fill:
    def fill(row: Any) -> Prompt:
        try:
            value = function(row)
            query, documents = value["query"], value["documents"]
        except Exception as error:
            raise RowError(
                f"the prompt's function must return query and documents ({type(error).__name__}: {error})"
            ) from error
        return _messages(query, documents)

    return fill


def _messages(query: Any, documents: Any) -> list[dict[str, str]]:
    texts = _listed(documents) if isinstance(documents, str) else documents
    if not isinstance(texts, Sequence) or not texts:
        raise RowError(_ADVICE)
    if not isinstance(query, str) or not all(isinstance(one, str) for one in texts):
        raise RowError(f"the query must be a text; {_ADVICE}")
    return [
        {"role": "query", "content": query},
        *({"role": "document", "content": one} for one in texts),
    ]


def _listed(text: str) -> list[str]:
    """The documents in a cell of a table: a JSON list of texts, or one text."""
    if text.startswith("["):
        try:
            return msgspec.json.decode(text, type=list[str])
        except msgspec.DecodeError:
            pass
    return [text]
