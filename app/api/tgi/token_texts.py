"""Text of each token of a response, in order.

A token may be a part of a character. Its text is then empty, and the token that completes the character
has it; all texts joined are the response. TGI attributes text in the same way
(server/text_generation_server/models/model.py, `decode_token`).
"""

from collections.abc import Sequence

from tokenizers import Tokenizer

_CONTEXT = 5  # tokens of the prompt: some tokenizers strip the leading space of a text
_INCOMPLETE = "\ufffd"


class TokenTexts:
    """Decodes a response token by token, after the prompt's tokens."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._ids = list(prompt_ids[-_CONTEXT:])
        self._decoded = len(self._ids)  # tokens whose text was returned
        self._begin = 0  # of the tokens to decode with the next one

    def add(self, identifier: int) -> str:
        self._ids.append(identifier)
        before = self._decode(self._ids[self._begin : self._decoded])
        now = self._decode(self._ids[self._begin :])
        if len(now) <= len(before) or now.endswith(_INCOMPLETE):
            return ""
        self._begin, self._decoded = self._decoded, len(self._ids)
        return now[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=False)
        return text
