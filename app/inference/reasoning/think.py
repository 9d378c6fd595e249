"""`<think>...</think>`, whose opening the prompt may have (DeepSeek, Qwen 3, GLM, Kimi, MiniMax)."""

from functools import partial

from app.inference.reasoning.reader import Format, TagReader

_OPENING, _CLOSING = "<think>", "</think>"


def _is_taught_by(template: str) -> bool:
    return _OPENING in template or _CLOSING in template


FORMAT = Format("think", _OPENING, _CLOSING, _is_taught_by, partial(TagReader, _OPENING, _CLOSING))
