"""Model outputs made to keep the writers of responses busy: their work grows linearly with the text.

Each dialect's writer gets them token by token, as one long delta, and as a completed result.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any

import orjson
import pytest
from tokenizers import Tokenizer, decoders, models

from app.api.anthropic.message_events import MessageEvents
from app.api.anthropic.messages import MessageShape, message_to_wire
from app.api.openai.chat_responses import ChatFrames, chat_completion
from app.api.openai.chat_schemas import ChatRequest
from app.api.openai.completions_schemas import (
    CompletionFrames,
    CompletionRequest,
    PromptText,
    completion,
)
from app.api.openai.response_events import ResponseEvents
from app.api.openai.responses_output import answer_message, response_to_wire
from app.api.openai.responses_schemas import ResponseCreate
from app.api.openai.stored_responses import StoredRequest
from app.api.output_rules import OutputRules
from app.api.tgi.response_schemas import EventWriter, generation_to_wire
from app.api.tgi.schemas import GenerateParameters, Generation
from app.api.tgi.token_texts import TokenTexts
from app.api.tool_use import ToolUse
from app.core.ids import new_id
from app.inference.prompts import PromptFormat
from app.inference.reasoning import ReasoningFormat, ReasoningUse
from app.inference.tool_calls import ToolFormat
from app.results.rows import ResultRow
from tests.result_rows import result_row
from tests.security.growth import assert_linear

_DELTA = 4  # characters, about those of a token
# Characters at once; four times as many are those of 32,000 tokens. Copies of what is written already show
# where there is much of it.
_LONG = 32_000
CHAT = ChatRequest.model_validate(
    {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "logprobs": True,
        "top_logprobs": 1,
        "stream_options": {"include_usage": True},
        "stream": True,
    }
)
COMPLETION = CompletionRequest.model_validate({"model": "m", "prompt": "x", "logprobs": 1})
TGI = GenerateParameters(details=True, top_n_tokens=1, stop=["\ufffd" * 64])
RULES = OutputRules(
    ToolUse(ToolFormat.HERMES), ReasoningUse(ReasoningFormat.THINK, is_open=True), len
)
CLOSED = OutputRules(ToolUse(ToolFormat.HERMES), ReasoningUse(ReasoningFormat.MISTRAL), len)
NAMED = OutputRules(ToolUse(ToolFormat.HERMES, name="f"))

# Each with the rules that read it: a text of about `n` characters.
ATTACKS: dict[str, tuple[OutputRules, Callable[[int], str]]] = {
    "plain text": (OutputRules(), lambda n: "a" * n),
    "emoji": (OutputRules(), lambda n: "\U0001f600" * n),
    "white space": (RULES, lambda n: " " * n),
    "white space behind thoughts": (RULES, lambda n: "a</think>" + " " * n),
    "thoughts": (RULES, lambda n: "a" * n),
    "thoughts behind thoughts": (CLOSED, lambda n: "a[THINK]b[/THINK]" * (n // 17)),
    "calls": (RULES, lambda n: "</think>" + '<tool_call>{"name":"f"}</tool_call>' * (n // 35)),
    "thoughts, texts and calls": (
        CLOSED,
        lambda n: '[THINK]a[/THINK]b<tool_call>{"name":"f"}</tool_call>' * (n // 52),
    ),
    "beginnings of calls": (RULES, lambda n: "</think>" + "<tool_call>" * (n // 11)),
    "a call's arguments": (NAMED, lambda n: '{"a":"' + "\\n" * (n // 2) + '"}'),
}

MANY_PIECES = ("thoughts behind thoughts", "calls", "beginnings of calls")


def _row(text: str, **more: Any) -> ResultRow:
    ended = datetime(2026, 1, 1, tzinfo=UTC)
    parameters = '{"max_tokens":9}'
    return result_row(output=text, parameters=parameters, finished_at=ended, **more)


def _deltas(text: str, size: int) -> list[str]:
    return [text[at : at + size] for at in range(0, len(text), size)]


def _chat(rules: OutputRules, text: str, size: int) -> None:
    frames = ChatFrames(CHAT, rules, [new_id()])
    frames.begin()
    for delta in _deltas(text, size):
        frames.delta(0, delta, ())
    frames.end(0, _row(text))


def _message(rules: OutputRules, text: str, size: int) -> None:
    events = MessageEvents(MessageShape("m", 9, ("\n" * 64,), rules), new_id())
    events.begin()
    for delta in _deltas(text, size):
        events.text(delta)
    events.end(_row(text))


def _stored(rules: OutputRules) -> StoredRequest:
    create = ResponseCreate.model_validate({"model": "m", "input": "x"})
    stored = StoredRequest.of(create.to_stored(rules))
    assert stored is not None
    return stored


def _response(rules: OutputRules, text: str, size: int) -> None:
    row = _row(text)
    events = ResponseEvents(_stored(rules), row.id)
    events.begin()
    events.attempt(1)
    for delta in _deltas(text, size):
        events.text(delta)
    events.end(row)


STREAMS = {"chat": _chat, "messages": _message, "responses": _response}
ANSWERS: dict[str, Callable[[OutputRules, ResultRow], object]] = {
    "chat": lambda rules, row: chat_completion(
        CHAT.model_copy(update={"logprobs": None}), rules, [row]
    ),
    "messages": lambda rules, row: message_to_wire(MessageShape("m", 9, (), rules), row),
    "responses": lambda rules, row: response_to_wire(_stored(rules), row),
    "turns": lambda rules, row: answer_message(_stored(rules), row, ["reasoning"]),
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("dialect", STREAMS)
def test_a_stream_of_tokens(dialect: str, attack: str) -> None:
    rules, make = ATTACKS[attack]
    assert_linear(lambda size: STREAMS[dialect](rules, make(size), _DELTA))


@pytest.mark.parametrize("attack", MANY_PIECES)
@pytest.mark.parametrize("dialect", STREAMS)
def test_one_long_delta(dialect: str, attack: str) -> None:
    """A reader that catches up, and the end of a text that was held back."""
    rules, make = ATTACKS[attack]
    assert_linear(lambda size: STREAMS[dialect](rules, make(size), size + 1_000), _LONG)


@pytest.mark.parametrize("attack", MANY_PIECES)
@pytest.mark.parametrize("dialect", ANSWERS)
def test_a_completed_result(dialect: str, attack: str) -> None:
    rules, make = ATTACKS[attack]
    assert_linear(lambda size: orjson.dumps(ANSWERS[dialect](rules, _row(make(size)))), _LONG)


# --- tokens -----------------------------------------------------------------------------------------

# Token ids of the tokenizers below, as far as a text of `n` tokens needs them: characters that never
# come to an end, bytes that are none, tokens that have no text.
UNKNOWN, LETTER = 300, ord("a")
TOKENS: dict[str, Callable[[int], list[int]]] = {
    "letters": lambda n: [LETTER] * n,
    "replacement characters": lambda n: list("\ufffd".encode()) * (n // 3),
    "bytes that continue nothing": lambda n: [0x80] * n,
    "beginnings of characters": lambda n: [0xF0] * n,
    "halves of characters": lambda n: [0xF0, 0x9F] * (n // 2),
    "tokens that are not in the vocabulary": lambda n: [UNKNOWN] * n,
    "no character at the end": lambda n: [LETTER] * (n // 2) + [0xF0] * (n // 2),
}


@cache
def _byte_level() -> Tokenizer:
    """Bytes as GPT-2's vocabulary spells them."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [one for one in range(256) if one not in shown]
    letters = {one: chr(one) for one in shown} | {
        one: chr(256 + place) for place, one in enumerate(hidden)
    }
    tokenizer = Tokenizer(models.BPE({letters[one]: one for one in range(256)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@cache
def _byte_fallback() -> Tokenizer:
    """Bytes as Llama's vocabulary spells them; letters are tokens of their own."""
    tokens = {f"<0x{one:02X}>": one for one in range(256) if one != LETTER} | {"a": LETTER}
    tokenizer = Tokenizer(models.BPE(tokens, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


TOKENIZERS = {"byte level": _byte_level, "byte fallback": _byte_fallback}


def _positions(ids: list[int], text: str = "\ufffd") -> list[dict[str, dict[str, Any]]]:
    return [{str(one): {"logprob": -0.5, "rank": 1, "decoded_token": text}} for one in ids]


def _wire(
    size: int, make: Callable[[int], list[int]] = TOKENS["letters"], text: str = "\ufffd"
) -> str:
    return orjson.dumps(_positions(make(size), text)).decode()


def _generation(name: str) -> Generation:
    known = PromptFormat(TOKENIZERS[name](), None, {}, 100, end_ids=frozenset({LETTER + 1}))
    return Generation("x", TGI, False, known, 10**6)


@pytest.mark.parametrize("attack", TOKENS)
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_the_texts_of_tokens(tokenizer: str, attack: str) -> None:
    def work(size: int) -> None:
        texts = TokenTexts(TOKENIZERS[tokenizer](), [LETTER])
        for identifier in TOKENS[attack](size):
            texts.add(identifier)

    assert_linear(work)


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
def test_tgi(tokenizer: str) -> None:
    """Its events one by one, a replay of all at once, and the details of a completed text."""
    positions = _positions(TOKENS["replacement characters"](60_000))

    def one_by_one(size: int) -> None:
        writer = EventWriter(_generation(tokenizer))
        for position in positions[:size]:
            writer.add("\ufffd" * 20, [position])

    assert_linear(one_by_one)
    assert_linear(lambda size: EventWriter(_generation(tokenizer)).add("x", positions[:size]))

    def complete(size: int) -> None:
        row = _row("x", logprobs=_wire(size, TOKENS["replacement characters"]))
        generation_to_wire(_generation(tokenizer), [row])

    assert_linear(complete)


LOGPROBS: dict[str, Callable[[int, str], object]] = {
    "completions": lambda size, text: CompletionFrames(COMPLETION, ["x"], [new_id()]).delta(
        0, "x", _positions([LETTER] * size, text)
    ),
    "chat": lambda size, text: ChatFrames(CHAT, RULES, [new_id()]).delta(
        0, "x", _positions([LETTER] * size, text)
    ),
    "a completed chat": lambda size, text: chat_completion(
        CHAT, RULES, [_row("x", logprobs=_wire(size, text=text))]
    ),
    "a completed text": lambda size, text: completion(
        COMPLETION, [PromptText("x", "")], [_row("x", logprobs=_wire(size, text=text))]
    ),
}


@pytest.mark.parametrize("text", ["a", "}},{"])
@pytest.mark.parametrize("dialect", LOGPROBS)
def test_openai_s_log_probabilities(dialect: str, text: str) -> None:
    assert_linear(lambda size: LOGPROBS[dialect](size, text))
