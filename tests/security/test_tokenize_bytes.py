"""Tokens of long texts: 360 bytes each in the tokenizer, 526 as a response, twelve of ours."""

import sys
import threading
import time
from typing import Any

import orjson
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

from app.api.tgi.response_schemas import token_frames
from app.inference import encoding
from app.inference.encoding import count_tokens, tokenize


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A byte-level tokenizer that puts a special token on each side."""
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}
    made = Tokenizer(BPE(letters, []))
    made.pre_tokenizer = ByteLevel(add_prefix_space=False)
    made.decoder = ByteLevelDecoder()
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    sides = [(name, made.token_to_id(name)) for name in ("<s>", "</s>")]
    made.post_processor = TemplateProcessing("<s> $A </s>", special_tokens=sides)
    return made


class Watched:
    """A tokenizer, and the longest text that it got."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest = 0
        self._tokenizer = tokenizer

    def encode_batch(self, texts: list[str], **options: Any) -> Any:
        self.longest = max(self.longest, *map(len, texts))
        return self._tokenizer.encode_batch(texts, **options)


@pytest.mark.parametrize("text", ["", "def f", "ab 🙂" * 400, "x" * 1_200, "x" * 1_000])
@pytest.mark.parametrize("is_special", [True, False])
def test_long_texts_are_encoded_piece_by_piece(
    tokenizer: Tokenizer, text: str, is_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert encoding._PIECE_CHARACTERS <= 50_000, "18 MB in the tokenizer"
    monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", 500)
    watched: Any = Watched(tokenizer)
    tokens = tokenize(watched, text, add_special_tokens=is_special)
    whole = tokenizer.encode(text, add_special_tokens=is_special)
    assert tokens.ids.tolist() == whole.ids
    assert list(zip(tokens.starts, tokens.stops, strict=True)) == whole.offsets
    assert watched.longest <= 500


def test_a_text_is_encoded_without_the_interpreters_lock(tokenizer: Tokenizer) -> None:
    """The event loop would wait for 10 ms of each piece, several times in each request."""
    steps, most = 0, 0  # of this thread: in all, and while one text was encoded
    is_over = threading.Event()

    def encode() -> None:
        nonlocal most
        for _ in range(200):
            before = steps
            count_tokens(tokenizer, "🙂" * 9_000)
            most = max(most, steps - before)
            if most > 5:
                break
        is_over.set()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)  # a thread has the lock until it gives it up
    try:
        threading.Thread(target=encode).start()
        while not is_over.is_set():
            steps += 1
            time.sleep(0)
    finally:
        sys.setswitchinterval(interval)
    assert most > 5


def test_tokens_are_sent_in_pieces(tokenizer: Tokenizer) -> None:
    text = "one 🙂 " * 2_000
    frames = list(token_frames(text, tokenize(tokenizer, text, add_special_tokens=True)))
    whole = tokenizer.encode(text)
    assert orjson.loads(b"".join(frames)) == [
        {"id": identifier, "text": text[start:stop], "start": start, "stop": stop}
        for identifier, (start, stop) in zip(whole.ids, whole.offsets, strict=True)
    ]
    assert max(map(len, frames)) < 65_536
    nothing = tokenize(tokenizer, "", add_special_tokens=False)
    assert b"".join(token_frames("", nothing)) == b"[]"
