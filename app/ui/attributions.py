"""View of an attribution: the text in parts, its spans, and the documents of one of them.

A response may name thousands of spans, each with a thousand documents; a page shows a bounded part, and
counts the rest.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from app.ui.spans import cut, locate, split_at, to_characters

MAX_SPANS = 500
MAX_DOCUMENTS = 20
_MAX_SNIPPET = 4_000  # characters
_MAX_METADATA = 2_000


def to_attribution(
    answer: Mapping[str, Any], text: str | None, chosen: int | None
) -> dict[str, Any]:
    """Template data of a response of `POST /{index}/attribution`.

    `text` is the attributed text; if it is deleted, the pieces of the response replace it. `chosen`
    is the place of a span in the list; None selects the longest. Takes a while for a long text:
    not for the event loop.
    """
    pieces = answer["inputTokens"]
    if text is None:
        text = "".join(pieces)
    ranges = locate(text, pieces)
    spans = answer["spans"][:MAX_SPANS]
    places = [to_characters(ranges, span["left"], span["right"]) for span in spans]
    if chosen is None or not 0 <= chosen < len(spans):
        # The longest.
        chosen = max(range(len(spans)), key=lambda place: spans[place]["length"], default=None)
    documents = [] if chosen is None else spans[chosen]["documents"]
    return {
        "index": answer["index"],
        "segments": cut(text, places),
        "tokens": len(pieces),
        "covered": _covered(answer["spans"], len(pieces)),
        "span_count": len(answer["spans"]),
        "spans": [
            {**span, "text": text[start:end] or span["text"]}
            for span, (start, end) in zip(spans, places, strict=True)
        ],
        "chosen": chosen,
        "documents": [_document(spans[chosen], one) for one in documents[:MAX_DOCUMENTS]],
        "document_count": len(documents),
    }


def _covered(spans: Sequence[Mapping[str, Any]], tokens: int) -> float:
    """The share of the tokens that are in a span; spans come in text order."""
    covered = reached = 0
    for span in spans:
        covered += max(0, span["right"] - max(reached, span["left"]))
        reached = max(reached, span["right"])
    return covered / tokens if tokens else 0.0


def _document(span: Mapping[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    snippet = document["textSnippet"]
    share = document["needleOffsetSnippet"] / max(1, document["displayOffsetSnippet"])
    before, match, behind = split_at(snippet, span["text"], share)
    return {
        "number": document["documentIndex"],
        "tokens": document["documentLength"],
        "before": before[-_MAX_SNIPPET:],
        "match": match[:_MAX_SNIPPET],
        "behind": behind[:_MAX_SNIPPET],
        "starts_inside": document["needleOffset"] > document["needleOffsetSnippet"],
        "title": _title(document["metadata"]),
        "metadata": json.dumps(document["metadata"], ensure_ascii=False, indent=2)[:_MAX_METADATA],
    }


def _title(metadata: Mapping[str, Any]) -> str:
    """The source of a document: a usual member of corpora, else the name of its file."""
    own = metadata.get("metadata")
    members = own if isinstance(own, dict) else {}
    for name in ("title", "url", "source", "path", "file", "name", "id"):
        if isinstance(members.get(name), str) and members[name]:
            return str(members[name])[:200]
    if isinstance(metadata.get("path"), str):
        line = metadata.get("linenum")
        return f"{metadata['path'][:200]}" + (f", line {line + 1}" if isinstance(line, int) else "")
    return "A document"
