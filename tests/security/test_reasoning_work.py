"""Model outputs made to keep a reader of reasoning busy: its work grows linearly with the text."""

from collections.abc import Callable

import pytest

from app.inference.reasoning import OutputReader, ReasoningFormat, ReasoningUse
from app.inference.tool_calls import ToolFormat, reader_of
from tests.security.growth import assert_linear

_DELTA = 4  # characters, about those of a token
THINK = ReasoningUse(ReasoningFormat.THINK, is_open=True, ends=("<tool_call>",))
MISTRAL = ReasoningUse(ReasoningFormat.MISTRAL)
COHERE = ReasoningUse(ReasoningFormat.COHERE)
HARMONY = ReasoningUse(ReasoningFormat.HARMONY)

# Each with the rules that read it: a text of about `n` characters.
ATTACKS: dict[str, tuple[ReasoningUse, Callable[[int], str]]] = {
    "nothing but space": (THINK, lambda n: " " * n),
    "beginnings of closing tags": (THINK, lambda n: "</thin" * (n // 6)),
    "reasoning without an end": (THINK, lambda n: "a" * n),
    "closed many times": (THINK, lambda n: "</think>" * (n // 8)),
    "openings in content": (THINK, lambda n: "</think>" + "<think>" * (n // 7)),
    "opened and closed": (MISTRAL, lambda n: "[THINK][/THINK]" * (n // 15)),
    "openings of openings": (MISTRAL, lambda n: "[THINK]" * (n // 7)),
    "frames": (COHERE, lambda n: "<|START_RESPONSE|>" * (n // 18)),
    "a header without an end": (HARMONY, lambda n: "<|channel|>" + "a" * n),
    "channels of channels": (HARMONY, lambda n: "<|channel|>" * (n // 11)),
    "beginnings of tokens": (HARMONY, lambda n: "<|" * (n // 2)),
    "messages of nothing": (HARMONY, lambda n: "<|channel|>final<|message|>" * (n // 27)),
    "recipients": (HARMONY, lambda n: (" to=" + "a" * 900 + "<|message|>") * (n // 915)),
    "calls": (HARMONY, lambda n: " to=functions.f<|message|>{}<|call|>" * (n // 36)),
    "one long call": (HARMONY, lambda n: " to=functions.f<|message|>" + "[" * n),
}


def _read(use: ReasoningUse, text: str, size: int) -> None:
    reader = OutputReader(use, reader_of(ToolFormat.HERMES))
    for at in range(0, len(text), size):
        reader.feed(text[at : at + size])
    reader.finish()


@pytest.mark.parametrize("attack", ATTACKS)
def test_the_work_grows_linearly(attack: str) -> None:
    use, make = ATTACKS[attack]
    assert_linear(lambda size: _read(use, make(size), _DELTA))


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_long_delta_is_read_in_linear_time(attack: str) -> None:
    use, make = ATTACKS[attack]
    assert_linear(lambda size: _read(use, make(size), len(make(size))))
