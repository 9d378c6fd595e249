"""Numbers of the scripted pooling model: pure functions of a request, without Triton (see model.py)."""

import hashlib
import math
import struct
from typing import Any

DIMENSIONS = 8
_RAW = 10  # times as large


def compute(content: Any, parameters: dict[str, Any]) -> list[float]:
    """The vector of a text or of token ids, or the scores of a query's documents."""
    if parameters["task"] == "score":
        query, *documents = content
        numbers = [score(query, one) for one in documents]
    else:
        text = content if isinstance(content, str) else " ".join(map(str, content))
        numbers = vector(text, parameters)
    return [number * _RAW for number in numbers] if parameters.get("raw") else numbers


def vector(text: str, parameters: dict[str, Any]) -> list[float]:
    """`dimensions` numbers, of length 1 unless `normalize` is false."""
    count = parameters.get("dimensions") or DIMENSIONS
    digest = hashlib.shake_128(text.encode()).digest(4 * count)
    numbers = [number / 2**31 - 1 for number in struct.unpack(f"<{count}I", digest)]
    if parameters.get("normalize") is False:
        return numbers
    length = math.sqrt(math.fsum(number * number for number in numbers))
    return [number / length for number in numbers]


def score(query: str, document: str) -> float:
    """The share of the query's words that the document has."""
    words, known = query.split(), set(document.split())
    return sum(word in known for word in words) / max(1, len(words))
