"""Documents within the results of tools: models here read texts and images only."""

from collections.abc import Iterable, Mapping
from typing import Any

from app.api.schema_parts import without_nul

_MAX_NAME = 200  # characters


def unread_document(name: object, kind: object = None) -> str:
    """A sentence for the model in place of a document, so that it can go on by other means.

    A refusal would end an agent's session: each later request has the same result in it.
    """
    known = [
        str(without_nul(one))[:_MAX_NAME] for one in (name, kind) if isinstance(one, str) and one
    ]
    details = f" ({', '.join(known)})" if known else ""
    return f"[A document{details} is here, which this service cannot show to the model: only texts and images.]"


def result_text(block: Mapping[str, Any]) -> str:
    """The text of a block of Anthropic's that is no text itself: a document, a result of a search, a tool's name."""
    if block.get("type") == "tool_reference":
        return f"[The tool {block.get('tool_name')} is available.]"
    title = block.get("title")
    if block.get("type") == "search_result":
        heads: Iterable[object] = (title, block.get("source"))
        return _lines(heads, _texts(block.get("content")))
    source = block.get("source")
    source = source if isinstance(source, dict) else {}
    heads = (title, block.get("context"))
    if source.get("type") == "text" and isinstance(source.get("data"), str):
        return _lines(heads, [source["data"]])
    if source.get("type") == "content":
        content = source.get("content")
        return _lines(heads, [content] if isinstance(content, str) else _texts(content))
    return unread_document(title, source.get("media_type"))


def _texts(content: object) -> list[str]:
    """The texts of blocks; of one that is no text, a sentence."""
    blocks = content if isinstance(content, list) else []
    return [
        str(one["text"]) if one.get("type") == "text" and "text" in one else unread_document(None)
        for one in blocks
        if isinstance(one, dict)
    ]


def _lines(heads: Iterable[object], texts: Iterable[str]) -> str:
    named = [one for one in heads if isinstance(one, str) and one]
    return "\n".join([*named, *texts])
