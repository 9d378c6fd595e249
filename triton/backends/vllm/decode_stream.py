"""Text of tokens as they come, in a time that is linear in their number.

The stream of the library `tokenizers` decodes all tokens since the last complete character with each new
one, so a text of bytes that complete none takes a time that is quadratic in its length, on the event loop
that all requests of the model share.
"""

import tokenizers.decoders
from tokenizers import Tokenizer

# A character has at most four bytes, so with more tokens than that something is no character. A
# model may write several special tokens without text in a row.
MAX_PENDING = 32


class BoundedDecodeStream:
    """In the place of `tokenizers.decoders.DecodeStream`; bytes that complete no character become U+FFFD."""

    library = tokenizers.decoders.DecodeStream

    def __init__(self, ids: list[int] | None = None, skip_special_tokens: bool = False) -> None:
        self.skips = skip_special_tokens
        self.stream = self.library(ids=ids, skip_special_tokens=skip_special_tokens)
        # The tokens of the last text, which the next one may depend on: a first word may lose its space.
        self.before = (ids or [])[-MAX_PENDING:]
        self.pending: list[int] = []

    def step(self, tokenizer: Tokenizer, token_id: int) -> str | None:
        """The text that the token completes. Raises what the library raises."""
        self.pending.append(token_id)
        text = self.stream.step(tokenizer, token_id)
        if text is not None:
            self.before, self.pending = self.pending, []
            return text
        if len(self.pending) < MAX_PENDING:
            return None
        before = tokenizer.decode(self.before, skip_special_tokens=self.skips)
        if before.endswith("\ufffd"):  # a prompt that ends within a character
            self.before, before = [], ""
        whole = tokenizer.decode(self.before + self.pending, skip_special_tokens=self.skips)
        # The library would give the text of tokens that end within a character again.
        self.stream = self.library(ids=self.before, skip_special_tokens=self.skips)
        self.pending = []
        return whole[len(before) :]


def install() -> None:
    """Let vLLM use it: it looks the class up in its module."""
    if tokenizers.decoders.DecodeStream is not BoundedDecodeStream:
        BoundedDecodeStream.library = tokenizers.decoders.DecodeStream
        tokenizers.decoders.DecodeStream = BoundedDecodeStream
