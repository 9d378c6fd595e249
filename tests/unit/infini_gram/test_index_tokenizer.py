"""Tokenizers of indexes: bytes, and a tokenizer.json."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Library, decoders, models, pre_tokenizers

from app.core.errors import InvalidRequestError
from app.infini_gram.declarations import BYTES
from app.infini_gram.tokenizer import SHORT_IDS, TokenizerError, open_tokenizer
from tests.indexes import DEMO_TOKENIZER, TOKENIZERS

TEXTS = ["", "def foo(self):\n    return 1", "Grüße, 東京 🙂", " leading", "\ta\r\n", "a\x00b"]


@pytest.mark.parametrize("source", TOKENIZERS, ids=["bytes", "demo"])
@pytest.mark.parametrize("text", TEXTS)
def test_there_and_back(source: str, text: str) -> None:
    tokenizer = open_tokenizer(source)
    ids = tokenizer.encode(text)
    assert all(0 <= one < tokenizer.vocab_size for one in ids)
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.tokens(ids)) == len(ids)
    assert all(tokenizer.tokens(ids))
    width = {"u8": 1, "u16": 2, "u32": 4}[tokenizer.dtype]
    assert tokenizer.encode_for_disk([text]) == [
        b"".join(one.to_bytes(width, "little") for one in ids)
    ]


@pytest.mark.parametrize("source", TOKENIZERS, ids=["bytes", "demo"])
def test_offsets_are_code_points(source: str) -> None:
    text = "Grüße 東京 🙂"
    tokenizer = open_tokenizer(source)
    ids, offsets = tokenizer.encode_with_offsets(text)
    assert len(ids) == len(offsets)
    assert tokenizer.pieces(text) == [text[start:end] for start, end in offsets]
    covered = {place for start, end in offsets for place in range(start, end)}
    assert covered == set(range(len(text)))


@pytest.mark.parametrize("source", TOKENIZERS, ids=["bytes", "demo"])
def test_lone_surrogates_are_no_text(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="lone surrogate at character 2"):
        open_tokenizer(source).encode("ab\ud800")


def test_nothing_is_put_around_a_text() -> None:
    demo = open_tokenizer(DEMO_TOKENIZER)
    assert demo.end_id == 0
    assert demo.token(0) == "<|endoftext|>"
    assert 0 not in demo.encode("def f")
    assert demo.token(4095) != ""
    assert demo.token(60_000) == ""


def test_word_starts() -> None:
    demo = open_tokenizer(DEMO_TOKENIZER)
    starts = demo.word_start_ids()
    assert starts == {
        one for one in range(demo.vocab_size) if demo.token(one).startswith(("Ġ", "Ċ"))
    }
    assert {chr(one) for one in open_tokenizer(BYTES).word_start_ids()} == {" ", "\n"}


def _save(tmp_path: Path, vocabulary: dict[str, int], name: str = "tokenizer.json") -> Path:
    library = Library(models.WordPiece(vocabulary, unk_token="[UNK]"))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / name))
    return tmp_path / name


def test_word_pieces(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[SEP]": 1, "re": 2, "##turn": 3, "the": 4, "##": 5}
    tokenizer = open_tokenizer(_save(tmp_path, vocabulary))
    assert tokenizer.encode("return the") == [2, 3, 4]
    assert tokenizer.word_start_ids() == {0, 1, 2, 4}
    assert tokenizer.end_id == 1


def test_ids_that_two_bytes_cannot_hold(tmp_path: Path) -> None:
    vocabulary = {"[UNK]": 0, "[SEP]": 1} | {f"w{n}": n for n in range(2, SHORT_IDS)}
    short = open_tokenizer(_save(tmp_path, vocabulary))
    assert (short.vocab_size, short.dtype) == (SHORT_IDS, "u16")
    assert short.encode_for_disk(["w65534"]) == [b"\xfe\xff"]
    vocabulary["onemore"] = SHORT_IDS
    wide = open_tokenizer(_save(tmp_path, vocabulary))
    assert (wide.vocab_size, wide.dtype) == (SHORT_IDS + 1, "u32")
    assert wide.encode_for_disk(["onemore w2"]) == [b"\xff\xff\0\0\2\0\0\0"]
    vocabulary["far"] = 2**24
    with pytest.raises(TokenizerError, match="ids up to 16777216: an index holds ids up to"):
        open_tokenizer(_save(tmp_path, vocabulary))


def test_the_end_of_text(tmp_path: Path) -> None:
    file = _save(tmp_path, {"[UNK]": 0, "a": 1, "end": 2})
    with pytest.raises(TokenizerError, match="give the token's id"):
        open_tokenizer(file)
    assert open_tokenizer(file, 2).end_id == 2
    with pytest.raises(TokenizerError, match="no token 3"):
        open_tokenizer(file, 3)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "end"}}')
    assert open_tokenizer(file).end_id == 2


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="cannot be read: No such file"):
        open_tokenizer(tmp_path / "gone.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"is no tokenizer\.json"):
        open_tokenizer(tmp_path / "bad.json")
    with pytest.raises(TokenizerError, match="empty vocabulary"):
        open_tokenizer(_save(tmp_path, {}))
