"""Pieces of a long text: their cuts, the places of their tokens, and the special tokens around them."""

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Strip
from tokenizers.pre_tokenizers import Split
from tokenizers.processors import TemplateProcessing

from app.inference import encoding
from app.inference.encoding import TokenizedText, tokenize


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "_PIECE_CHARACTERS", 8)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """A token for each character, but for space around a text; two special tokens on each side."""
    names = ["<unk>", "<s>", "<t>", "</t>", "</s>", *"abcdefgh "]
    made = Tokenizer(WordLevel({name: place for place, name in enumerate(names)}, "<unk>"))
    made.normalizer = Strip()
    made.pre_tokenizer = Split("", "isolated")
    made.add_special_tokens([AddedToken(name) for name in names[1:5]])
    sides = [(name, made.token_to_id(name)) for name in names[1:5]]
    made.post_processor = TemplateProcessing("<s> <t> $A </t> </s>", special_tokens=sides)
    return made


def words(tokenizer: Tokenizer, tokens: TokenizedText) -> str:
    return " ".join(str(tokenizer.id_to_token(identifier)) for identifier in tokens.ids)


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("", [0]),
        ("abcdefgh", [0]),  # as long as a piece
        ("abcdefgha", [0, 8]),
        ("abcdefghabcdefgha", [0, 8, 16]),
        ("abcd efgh", [0, 4]),  # in front of a space in the second half
        ("abc defgh", [0, 8]),
        ("abcdefg habcde", [0, 7]),
        ("abcdefgh abcdefg", [0, 8]),
        ("abcd e gh", [0, 6]),  # the last space
    ],
)
def test_a_text_is_cut_in_front_of_a_space_of_the_second_half(text: str, cuts: list[int]) -> None:
    pieces = list(encoding._pieces(text))
    assert [begin for begin, _ in pieces] == cuts
    assert [end for _, end in pieces] == [*cuts[1:], len(text)]


@pytest.mark.parametrize("text", ["", "a", "abcdefgh", "abcdefgha", "abcdefgh" * 3])
def test_special_tokens_are_at_the_ends_of_the_whole_text_alone(
    tokenizer: Tokenizer, text: str
) -> None:
    tokens = tokenize(tokenizer, text, add_special_tokens=True)
    expected = " ".join(["<s>", "<t>", *text, "</t>", "</s>"])
    assert words(tokenizer, tokens) == expected
    inner = [(place, place + 1) for place in range(len(text))]
    places = [(0, 0), (0, 0), *inner, (0, 0), (0, 0)]
    assert list(zip(tokens.starts, tokens.stops, strict=True)) == places
    assert len(tokens) == len(text) + 4
    bare = tokenize(tokenizer, text, add_special_tokens=False)
    assert words(tokenizer, bare) == " ".join(text)
    assert list(zip(bare.starts, bare.stops, strict=True)) == inner


def test_special_tokens_of_a_text_are_kept_at_its_cuts(tokenizer: Tokenizer) -> None:
    text = "abcdefgh<s>abcdeab"
    pieces = [text[begin:end] for begin, end in encoding._pieces(text)]
    assert pieces == ["abcdefgh", "<s>abcde", "ab"]
    tokens = tokenize(tokenizer, text, add_special_tokens=True)
    assert words(tokenizer, tokens) == "<s> <t> a b c d e f g h <s> a b c d e a b </t> </s>"


def test_a_piece_may_have_no_token(tokenizer: Tokenizer) -> None:
    tokens = tokenize(tokenizer, "a" + " " * 30 + "b", add_special_tokens=True)
    assert words(tokenizer, tokens) == "<s> <t> a b </t> </s>"
