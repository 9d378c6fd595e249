"""`{"name": ..., "parameters": {...}}` as the whole output; `;` separates calls (Llama 3 and 4)."""

from functools import partial

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import parse_sequence

_TAG = "<|python_tag|>"
_TAGS = (_TAG, "<|python_start|>", "<|python_end|>")


def _is_taught_by(template: str) -> bool:
    markers = (*_TAGS, "<|start_header_id|>", "<|header_start|>")
    has_tokens = any(marker in template for marker in markers)
    return has_tokens and "<tool_call>" not in template


FORMAT = Format("llama3_json", _is_taught_by, partial(parse_sequence, separators=(";", *_TAGS)))
