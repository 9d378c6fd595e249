"""Each token's text: a character of several tokens is part of the token that completes it."""

import pytest
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.api.tgi.token_texts import TokenTexts
from app.inference.prompts import read_format
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """The demo model's, which falls back to bytes."""
    known = read_format(ROOT / "models", "demo")
    assert known is not None
    assert known.tokenizer is not None
    return known.tokenizer


def texts_of(tokenizer: Tokenizer, ids: list[int], prompt_ids: list[int]) -> list[str]:
    texts = TokenTexts(tokenizer, prompt_ids)
    return [texts.add(identifier) for identifier in ids]


def test_a_character_of_several_tokens_is_the_last_ones(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂b", add_special_tokens=False).ids
    assert texts_of(tokenizer, ids, []) == ["a", "", "", "", "🙂", "b"]


def test_end_tokens_have_their_name(tokenizer: Tokenizer) -> None:
    assert texts_of(tokenizer, [0], [68]) == ["<|endoftext|>"]


def test_the_space_before_a_word_behind_the_prompt_is_kept() -> None:
    """Some tokenizers drop the space that begins a text."""
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    words.decoder = decoders.Metaspace()
    assert texts_of(words, [1, 0], [0]) == [" b", " a"]
    assert texts_of(words, [1, 0], []) == ["b", " a"]


@given(prompt=st.text(max_size=20), text=st.text(max_size=60))
def test_all_texts_are_the_answer(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    reported = texts_of(tokenizer, ids, tokenizer.encode(prompt).ids)
    # A replacement character of the text itself waits for what follows.
    assert text.startswith("".join(reported))
    if not text.endswith("\ufffd"):
        assert "".join(reported) == text


SMILE = list("🙂".encode())


@pytest.fixture(scope="module")
def bytes_alone() -> Tokenizer:
    """A vocabulary of bytes, and of pairs that are the end of a character and the start of another."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in shown]
    letters = {one: chr(one) for one in shown} | {
        one: chr(256 + place) for place, one in enumerate(hidden)
    }
    vocabulary = {letters[one]: one for one in range(256)}
    vocabulary[letters[SMILE[3]] + "".join(letters[one] for one in SMILE[:3])] = 256
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([0x80] * 5 + [97], ["", "", "", "\ufffd", "\ufffd", "\ufffd\ufffd\ufffda"]),
        ([0xF0, *SMILE, 97], ["", "", "", "\ufffd", "🙂", "a"]),
        ([0xF0] * 4 + SMILE, [*["", "", "", "\ufffd"], *["\ufffd"] * 3, "🙂"]),
        ([*SMILE[:3], *[256] * 5, SMILE[3]], ["", "", "", "🙂", *["🙂"] * 4, "🙂"]),
        ([97, 300, 300, 300, 300, 98], ["a", "", "", "", "", "b"]),
    ],
)
def test_what_becomes_no_character_is_returned(
    bytes_alone: Tokenizer, ids: list[int], texts: list[str]
) -> None:
    assert texts_of(bytes_alone, ids, []) == texts
