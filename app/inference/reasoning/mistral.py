"""`[THINK]...[/THINK]`, also several of them (Magistral)."""

from functools import partial

from app.inference.reasoning.reader import Format, TagReader

_OPENING, _CLOSING = "[THINK]", "[/THINK]"


FORMAT = Format(
    "mistral",
    _OPENING,
    _CLOSING,
    lambda template: _OPENING in template,
    partial(TagReader, _OPENING, _CLOSING, reopens=True),
)
