"""Text to the token ids of an index, and back: a tokenizer.json, or bytes.

The tokens that begin a word follow infini-gram API's rule (scripts/dump_dolma2_bow_ids.py and
scripts/attribution/dump_bow_ids.py of its repositories): those whose first character is a space
or a line's end in the vocabulary's spelling.
"""

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import orjson
import tokenizers

from app.core.errors import InvalidRequestError
from app.infini_gram.declarations import BYTES, MAX_VOCABULARY, TYPE_CODE, TokenDtype

# Ids of an index of two bytes a token: 65535 separates documents.
SHORT_IDS = 65_535
# The byte 0xff separates documents; UTF-8 uses neither it nor 0xfe.
_BYTE_IDS = 255
_BYTE_END = 254

_WORD_STARTS = ("\u0120", "\u010a", "\u2581")  # byte-level space and newline, SentencePiece's space
_CONTINUATION = "##"  # WordPiece's
_ENDS = ("</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]", "<|im_end|>")


class TokenizerError(Exception):
    """The tokenizer cannot be used for an index; the message is one line."""


class Tokenizer(ABC):
    """Encodes like an index's corpus: no tokens are added before or after a text.

    `vocab_size` bounds the ids: each is below it. `dtype` is the narrowest that holds them. `end_id` is the
    end of a document in the engine's results. `sha256` identifies the tokenizer; bytes have none.
    """

    vocab_size: int
    end_id: int
    dtype: TokenDtype
    sha256: str | None

    @abstractmethod
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and positions [start, end) in code points. Raises InvalidRequestError."""

    @abstractmethod
    def encode_for_disk(self, texts: Sequence[str]) -> list[bytes]:
        """The ids of many texts, in an index's format. Raises UnicodeEncodeError."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str: ...

    @abstractmethod
    def token(self, token_id: int) -> str: ...

    @abstractmethod
    def word_start_ids(self) -> frozenset[int]: ...

    def encode(self, text: str) -> list[int]:
        return self.encode_with_offsets(text)[0]

    def tokens(self, ids: Iterable[int]) -> list[str]:
        return [self.token(one) for one in ids]

    def pieces(self, text: str) -> list[str]:
        """The text, cut at the boundaries of its tokens.

        Tokens may share a character: Llama 2 has a space of its own before a first digit. As in infini-gram
        API, the first then ends where the second begins.
        """
        offsets = self.encode_with_offsets(text)[1]
        if len(offsets) > 1 and offsets[0][1] > offsets[1][0]:
            offsets[0] = (offsets[0][0], offsets[1][0])
        return [text[start:end] for start, end in offsets]


class FileTokenizer(Tokenizer):
    def __init__(self, file: Path, end_id: int | None = None) -> None:
        try:
            content = file.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{file} cannot be read: {error.strerror}") from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library's own are plain Exceptions
            raise TokenizerError(f"{file} is no tokenizer.json: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise TokenizerError(f"{file} has an empty vocabulary")
        self.vocab_size = max(vocabulary.values()) + 1
        if self.vocab_size > MAX_VOCABULARY:
            raise TokenizerError(
                f"{file} has token ids up to {self.vocab_size - 1}: an index holds ids up to "
                f"{MAX_VOCABULARY - 1}; take a tokenizer with fewer tokens, or bytes"
            )
        self.dtype = "u16" if self.vocab_size <= SHORT_IDS else "u32"
        self.end_id = _end_id(file, vocabulary) if end_id is None else end_id
        if not 0 <= self.end_id < self.vocab_size:
            raise TokenizerError(f"{file} has no token {self.end_id} that could be a text's end")

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        _check(text)
        # A batch of one: unlike `encode` it works without the interpreter's lock.
        (encoding,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def encode_for_disk(self, texts: Sequence[str]) -> list[bytes]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [array(TYPE_CODE[self.dtype], encoding.ids).tobytes() for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        return self._tokenizer.id_to_token(token_id) or ""

    def word_start_ids(self) -> frozenset[int]:
        return self._word_start_ids

    @cached_property
    def _word_start_ids(self) -> frozenset[int]:
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        has_word_pieces = any(
            token.startswith(_CONTINUATION) and token.strip("#") for token in vocabulary
        ) and not any(token.startswith(_WORD_STARTS) for token in vocabulary)
        if has_word_pieces:
            return frozenset(
                token_id
                for token, token_id in vocabulary.items()
                if not token.startswith(_CONTINUATION)
            )
        return frozenset(
            token_id for token, token_id in vocabulary.items() if token.startswith(_WORD_STARTS)
        )


class ByteTokenizer(Tokenizer):
    vocab_size = _BYTE_IDS
    end_id = _BYTE_END
    dtype: TokenDtype = "u8"
    sha256 = None

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        _check(text)
        offsets = [
            (place, place + 1)
            for place, character in enumerate(text)
            for _ in character.encode("utf-8")
        ]
        return list(text.encode("utf-8")), offsets

    def encode_for_disk(self, texts: Sequence[str]) -> list[bytes]:
        return [text.encode("utf-8") for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    def token(self, token_id: int) -> str:
        return bytes([token_id]).decode("utf-8", "backslashreplace")

    def word_start_ids(self) -> frozenset[int]:
        return frozenset(b" \n")


def open_tokenizer(source: str | Path, end_id: int | None = None) -> Tokenizer:
    """Open "bytes", or a tokenizer.json and the id of its end of text. Raises TokenizerError."""
    return ByteTokenizer() if source == BYTES else FileTokenizer(Path(source), end_id)


def _check(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"The text has a lone surrogate at character {error.start}: it cannot be encoded."
        ) from None


def _end_id(file: Path, vocabulary: dict[str, int]) -> int:
    """The end-of-text token that the files beside the tokenizer name, or a usual one."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            declared = orjson.loads(file.with_name(name).read_bytes()).get("eos_token")
        except (OSError, orjson.JSONDecodeError, AttributeError):
            continue
        token = declared.get("content") if isinstance(declared, dict) else declared
        if isinstance(token, str) and token in vocabulary:
            return vocabulary[token]
    for token in _ENDS:
        if token in vocabulary:
            return vocabulary[token]
    raise TokenizerError(
        f"{file} does not name its end-of-text token: give the token's id (--eos-id)"
    )
