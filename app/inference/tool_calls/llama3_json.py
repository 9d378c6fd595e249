"""`{"name": ..., "parameters": {...}}` as the whole output; `;` separates calls (Llama 3)."""

from functools import partial

from app.inference.tool_calls.reader import Format
from app.inference.tool_calls.source import parse_sequence

_TAG = "<|python_tag|>"


def _is_taught_by(template: str) -> bool:
    has_tokens = _TAG in template or "<|start_header_id|>" in template
    return has_tokens and "<tool_call>" not in template


FORMAT = Format("llama3_json", _is_taught_by, partial(parse_sequence, separators=(";", _TAG)))
