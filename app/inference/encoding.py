"""Tokens of a text in little memory.

The tokenizer takes 360 bytes a token while it works, so a long text is encoded piece by piece.
"""

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from tokenizers import Encoding, Tokenizer

# A batch is encoded in the thread that asks for it.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
# Each list of a piece's tokens is made while the interpreter's lock is held: about a millisecond.
_PIECE_CHARACTERS = 10_000


def _integers() -> "array[int]":
    return array("I")


@dataclass(slots=True, frozen=True)
class TokenizedText:
    """Ids of tokens, and the place of each in the text, in code points: twelve bytes a token."""

    ids: "array[int]" = field(default_factory=_integers)
    starts: "array[int]" = field(default_factory=_integers)
    stops: "array[int]" = field(default_factory=_integers)

    def __len__(self) -> int:
        return len(self.ids)


def tokenize(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool) -> TokenizedText:
    """The tokens of a text. Special tokens around it have the place 0."""
    tokens = TokenizedText()
    for begin, encoding, first, last in _encodings(tokenizer, text, add_special_tokens):
        tokens.ids.extend(encoding.ids[first:last])
        places = encoding.offsets[first:last]
        # A token has a length, unless it is special.
        tokens.starts.extend([begin + start if stop else 0 for start, stop in places])
        tokens.stops.extend([begin + stop if stop else 0 for _, stop in places])
    return tokens


def count_tokens(tokenizer: Tokenizer, text: str) -> int:
    """The number of a text's tokens, with the special ones around it."""
    return sum(last - first for _, _, first, last in _encodings(tokenizer, text, True))


def _encodings(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool
) -> Iterator[tuple[int, Encoding, int, int]]:
    """The place and the encoding of each piece, and the slice of it that belongs to the text."""
    for begin, end in _pieces(text):
        # `encode` keeps the interpreter's lock for as long as it takes: 10 ms of such a piece.
        (encoding,) = tokenizer.encode_batch(
            [text[begin:end]], add_special_tokens=add_special_tokens
        )
        first, last = 0, len(encoding)
        if add_special_tokens and (begin or end < len(text)):
            first, last = _inner(encoding.special_tokens_mask, begin, len(text) - end)
        yield begin, encoding, first, last


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """The places at which a long text is cut: in front of a space, if there is one.

    Most tokenizers divide a text there anyway. With others a cut adds a token at most.
    """
    begin = 0
    while len(text) - begin > _PIECE_CHARACTERS:
        end = begin + _PIECE_CHARACTERS
        space = text.rfind(" ", begin + _PIECE_CHARACTERS // 2, end)
        yield begin, (end if space < 0 else space)
        begin = end if space < 0 else space
    yield begin, len(text)


def _inner(special: list[int], before: int, behind: int) -> tuple[int, int]:
    """The tokens of a piece without the special ones at its cut ends."""
    first, last = 0, len(special)
    while before and first < last and special[first]:
        first += 1
    while behind and first < last and special[last - 1]:
        last -= 1
    return first, last
