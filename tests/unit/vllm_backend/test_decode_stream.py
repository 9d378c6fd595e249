"""Text of tokens as they come: the library's own, in bounded work for each token."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import tokenizers.decoders
from tokenizers import Tokenizer, decoders, models

from tests.conftest import ROOT
from tests.unit.vllm_backend.modules import load

BYTES = {f"<0x{number:02X}>": number + 3 for number in range(256)}
WORDS = {
    word: 259 + place for place, word in enumerate(["\u2581a", "b", "\u2581", "\u6f22", "\u2581c"])
}


@pytest.fixture
def module() -> Iterator[Any]:
    library = tokenizers.decoders.DecodeStream
    yield load("decode_stream")
    tokenizers.decoders.DecodeStream = library  # type: ignore[misc]


def of_bytes() -> Tokenizer:
    """The demo model's tokenizer: each byte has a token."""
    return Tokenizer.from_file(str(ROOT / "models/demo/1/tokenizer.json"))


def of_sentences() -> Tokenizer:
    """As SentencePiece's: a first word loses its space, and other bytes have tokens."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2} | BYTES | WORDS
    one = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    one.add_special_tokens(["<s>", "</s>"])
    one.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return one


def texts(stream: Any, tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    """Up to a byte that makes one token of those before, which the library refuses."""
    found: list[str | None] = []
    with contextlib.suppress(Exception):
        found += (stream.step(tokenizer, one) for one in ids)
    return found


@pytest.mark.parametrize("make", [of_bytes, of_sentences])
@pytest.mark.parametrize("skips", [True, False])
def test_texts_are_the_librarys(module: Any, make: Any, skips: bool) -> None:
    tokenizer, chance = make(), random.Random(1)  # noqa: S311
    for _ in range(100):
        prompt, ids = (
            [chance.randrange(tokenizer.get_vocab_size()) for _ in range(count)]
            for count in (3, 60)
        )
        expected = texts(tokenizers.decoders.DecodeStream(prompt, skips), tokenizer, ids)
        pending = "".join("x" if one is None else " " for one in expected).split()
        if max(map(len, pending), default=0) < module.MAX_PENDING:
            assert texts(module.BoundedDecodeStream(prompt, skips), tokenizer, ids) == expected


@pytest.mark.parametrize(("make", "word"), [(of_bytes, " word"), (of_sentences, "\u2581a")])
@pytest.mark.parametrize("begin", [True, False])
def test_bytes_that_are_no_character_become_a_text_after_a_while(
    module: Any, make: Any, word: str, begin: bool
) -> None:
    tokenizer = make()
    bad = (
        BYTES["<0xE6>"]
        if make is of_sentences
        else tokenizer.encode("\u6f22", add_special_tokens=False).ids[0]
    )
    ids = (
        tokenizer.encode(word, add_special_tokens=False).ids if make is of_bytes else [WORDS[word]]
    )
    sent = [*ids, *[bad] * 1_000, *ids] if begin else [*[bad] * 1_000, *ids]
    stream = module.BoundedDecodeStream(ids)
    found = texts(stream, tokenizer, sent)
    assert (
        "".join(one or "" for one in found)
        == tokenizer.decode(ids + sent)[len(tokenizer.decode(ids)) :]
    )
    longest = max(map(len, "".join("x" if one is None else " " for one in found).split()))
    assert longest == module.MAX_PENDING - 1


def test_tokens_without_text_are_not_held(module: Any) -> None:
    tokenizer = of_sentences()
    stream = module.BoundedDecodeStream(skip_special_tokens=True)
    found = texts(stream, tokenizer, [WORDS["b"], *[1] * 100, WORDS["\u2581a"]])
    assert "".join(one or "" for one in found) == "b a"
    assert not stream.pending


def test_the_engine_finds_it_in_the_library(module: Any) -> None:
    module.install()
    module.install()
    assert tokenizers.decoders.DecodeStream is module.BoundedDecodeStream
    assert texts(module.tokenizers.decoders.DecodeStream(), of_sentences(), [WORDS["b"]]) == ["b"]
