"""`<|START_THINKING|>...<|END_THINKING|>` and a framed response (Command A)."""

from functools import partial

from app.inference.reasoning.reader import Format, TagReader

_OPENING, _CLOSING = "<|START_THINKING|>", "<|END_THINKING|>"
_FRAMES = ("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>")


FORMAT = Format(
    "cohere",
    _OPENING,
    _CLOSING,
    lambda template: _OPENING in template,
    partial(TagReader, _OPENING, _CLOSING, frames=_FRAMES),
)
