"""Text of each token of a response, in order.

A token may be a part of a character. Its text is then empty, and the token that completes the character
has it; all texts joined are the response. TGI attributes text in the same way
(server/text_generation_server/models/model.py, `decode_token`).
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

_CONTEXT = 5  # tokens of the prompt: some tokenizers strip the leading space of a text
_INCOMPLETE = "\ufffd"
_MAX_PENDING = 3  # tokens: a character has at most four bytes, and each token has at least one


class TokenTexts:
    """Decodes a response token by token, after the prompt's tokens.

    A token's work is bounded: text that more tokens do not turn into a character is returned as it is.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])  # to decode with the next one
        self._pending = 0  # of these: tokens that have no text so far
        self._known = len(self._decode(self._ids))  # characters of their text that are no more news

    def add(self, identifier: int) -> str:
        self._ids.append(identifier)
        self._pending += 1
        now = self._decode(self._ids)
        if len(now) > self._known and not now.endswith(_INCOMPLETE):
            return self._keep(self._pending, now, 0)
        if self._pending <= _MAX_PENDING:
            return ""
        # Only the last tokens can still become a character.
        latest = self._decode(self._ids[-_MAX_PENDING:])
        return self._keep(_MAX_PENDING, now, min(_incomplete(now), _incomplete(latest)))

    def _keep(self, count: int, now: str, held: int) -> str:
        """Return the new text without its last `held` characters; forget all but `count` tokens."""
        text = now[self._known : len(now) - held]
        self._ids = self._ids[-count:]
        self._pending = count if held else 0
        self._known = len(self._decode(self._ids)) - held
        return text

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text


def _incomplete(text: str) -> int:
    """The characters at a text's end that may be parts of one."""
    return len(text) - len(text.rstrip(_INCOMPLETE))
