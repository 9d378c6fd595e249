"""`<seed:think>...</seed:think>` (Seed-OSS)."""

from functools import partial

from app.inference.reasoning.reader import Format, TagReader

_OPENING, _CLOSING = "<seed:think>", "</seed:think>"


def _is_taught_by(template: str) -> bool:
    # The template may build its tags from a variable: `</seed:think>` alone is enough.
    return "seed:think" in template


FORMAT = Format("seed", _OPENING, _CLOSING, _is_taught_by, partial(TagReader, _OPENING, _CLOSING))
