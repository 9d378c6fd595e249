"""A reader of tokens: it gets each once, from memory and from the row of the end."""

import asyncio
from dataclasses import replace
from typing import Any, cast

import orjson

from app.results.rows import ResultRow
from app.results.store import ResultStore
from app.results.streams.hub import StreamHub
from app.results.streams.result_reader import (
    AttemptStarted,
    Ended,
    Position,
    ResultReader,
    TextDelta,
)
from tests.result_rows import result_row
from tests.unit.results.test_result_reader import new_hub
from tests.unit.worker.test_attempt import Scripted, claim_of


def tokens(*ids: int) -> str:
    return orjson.dumps([{str(one): {"logprob": -1}} for one in ids]).decode()


def reader_of(hub: StreamHub, result_id: Any, *, with_tokens: bool = True) -> ResultReader:
    store = cast(ResultStore, None)
    return ResultReader(hub, store, "default", result_id, Position(), 60.0, with_tokens=with_tokens)


async def test_each_token_is_read_once() -> None:
    hub = new_hub()
    attempt = Scripted(claim_of(), hub.on_text)
    result_id = attempt.claim.id
    hub.attach(attempt)
    attempt.tokens.append(tokens(1, 2))
    attempt.say("ab")
    reader, found, texts = reader_of(hub, result_id), list[str](), list[str]()
    row: ResultRow | None = None
    async for event in reader.events():
        if isinstance(event, TextDelta):
            found += [key for token in event.tokens for key in token]
            texts.append(event.text)
            if len(texts) == 1:
                attempt.tokens.append(tokens(3))
                attempt.say("c")
            elif len(texts) == 2:  # a token without a text
                attempt.tokens.append(tokens(4))
                hub.on_text(attempt)
            elif len(texts) == 3:
                row = result_row(
                    id=result_id, attempt=3, output="abcd", logprobs=tokens(1, 2, 3, 4, 5)
                )
                hub.deliver(cast(Any, row._asdict()))
        elif isinstance(event, Ended):
            assert event.row == row
            assert event.position == Position(3, 5)
        else:
            assert event == AttemptStarted(Position(3, 0))
    assert found == ["1", "2", "3", "4", "5"]
    assert texts == ["ab", "c", "", "d"]


async def test_a_reader_of_text_gets_no_tokens() -> None:
    hub, row = new_hub(), result_row(output="text", logprobs=tokens(1))
    hub.attach(Scripted(replace(claim_of(), id=row.id, attempt=1), hub.on_text))
    events = reader_of(hub, row.id, with_tokens=False).events()
    assert isinstance(await anext(events), AttemptStarted)
    hub.deliver(cast(Any, row._asdict()))
    delta = await anext(events)
    assert isinstance(delta, TextDelta)
    assert (delta.text, list(delta.tokens), delta.completion_tokens) == ("text", [], 2)
    assert [type(event) async for event in events] == [Ended]


async def test_a_long_text_is_read_in_turns_with_other_tasks() -> None:
    """The tokens of one event are few, and other tasks run between two events."""
    hub = new_hub()
    row = result_row(output="a" * 5_000, logprobs=tokens(*range(5_000)))
    hub.attach(Scripted(replace(claim_of(), id=row.id, attempt=1), hub.on_text))
    events = reader_of(hub, row.id).events()
    assert isinstance(await anext(events), AttemptStarted)
    hub.deliver(cast(Any, row._asdict()))
    rounds, found = 0, list[int]()

    async def count_rounds() -> None:
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_rounds())
    async for event in events:
        if isinstance(event, TextDelta):
            assert len(event.tokens) <= 1_000
            found += [int(key) for token in event.tokens for key in token]
    counting.cancel()
    assert found == list(range(5_000))
    assert rounds >= 5
