"""Statements that several requests share: bounded by bytes; one that times out stops no other."""

import asyncio
import gc
import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from app.core.database import Connection, Database
from app.core.errors import InvalidRequestError
from app.core.group_commit import (
    _MAX_LONE_TIMEOUTS,
    MAX_STATEMENT_BYTES,
    Batcher,
    StatementTimeoutError,
)
from app.core.ids import new_id
from app.queue import finish
from app.queue.enqueue import enqueue_bytes, to_statement
from app.queue.finish import AttemptEnd
from app.results.choices import check_choices
from app.results.requests import MAX_PROMPT_CHARACTERS
from app.worker.end_writer import EndWriter
from tests.integration.queue.queue_bench import Bench, ended, make_result

MEBIBYTE = 2**20


class Sizes:
    """A statement whose items are their sizes; those in `timeouts` time out so many times."""

    def __init__(self, timeouts: Mapping[int, float] | None = None) -> None:
        self.timeouts = dict(timeouts or {})
        self.batches: list[list[int]] = []
        self.gate = asyncio.Event()

    async def __call__(
        self, connection: Connection, items: Sequence[int], _resent: bool
    ) -> Sequence[int]:
        await self.gate.wait()
        self.batches.append(list(items))
        for item in items:
            if self.timeouts.get(item, 0) > 0:
                self.timeouts[item] -= 1
                raise TimeoutError
        return items


async def commit_all(
    database: Database, statement: Sizes, items: Sequence[int]
) -> list[int | BaseException]:
    """Submit the items while the first one is under way; their answers."""

    async def sizes(connection: Connection, items: Sequence[int], resent: bool) -> Sequence[int]:
        return await statement(connection, items, resent)

    batcher: Batcher[int, int] = Batcher(
        database, sizes, max_items=100, retry_seconds=float("inf"), size=sum
    )
    submitted = [asyncio.create_task(batcher.submit(item)) for item in items]
    await asyncio.sleep(0)
    statement.gate.set()
    answers = await asyncio.gather(*submitted, return_exceptions=True)
    await batcher.close()
    return answers


async def test_a_statement_is_bounded_by_bytes(bench: Bench) -> None:
    statement = Sizes()
    items = [3 * MEBIBYTE, 4 * MEBIBYTE, 2 * MEBIBYTE, 20 * MEBIBYTE, 70_000, 80_000, 8 * MEBIBYTE]
    assert await commit_all(bench.database, statement, items) == items
    assert [item for batch in statement.batches for item in batch] == items  # first in, first out
    assert all(len(one) == 1 or sum(one) <= MAX_STATEMENT_BYTES for one in statement.batches)
    assert len(statement.batches) == 5


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ([1], [5_000]),
        ([4_096], [65_536]),
        ([1], [2 * MEBIBYTE]),
        ([65_536], [65_537]),
        ([1] * 8, [1] * 9),
        ([1] * 32, [1] * 33),
        ([1] * 8, [1] * 33),
    ],
)
async def test_a_group_waits_for_no_larger_one(
    bench: Bench, small: list[int], large: list[int]
) -> None:
    """The statements of ten larger ones are under way until the small one is committed."""
    is_small_committed = asyncio.Event()

    async def sizes(connection: Connection, items: Sequence[int], _resent: bool) -> Sequence[int]:
        if len(items) != len(small) or max(items) > max(small):
            await is_small_committed.wait()
        return items

    batcher: Batcher[int, int] = Batcher(
        bench.database, sizes, max_items=1, retry_seconds=5, size=sum
    )
    waiting = [asyncio.create_task(batcher.submit_all(large)) for _ in range(10)]
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        assert await batcher.submit_all(small) == small
    is_small_committed.set()
    assert await asyncio.gather(*waiting) == [large] * 10
    await batcher.close()


async def test_a_large_item_in_line_shares_no_time_with_another(bench: Bench) -> None:
    under_way: list[int] = []

    async def sizes(connection: Connection, items: Sequence[int], _resent: bool) -> Sequence[int]:
        under_way.append(1)
        assert len(under_way) == 1
        await asyncio.sleep(0.1)  # another lane would begin meanwhile
        under_way.clear()
        return items

    batcher: Batcher[int, int] = Batcher(
        bench.database, sizes, max_items=1, retry_seconds=5, size=sum
    )
    items = [2 * MEBIBYTE, 1, 3 * MEBIBYTE, 2]
    answers = await asyncio.gather(*(batcher.submit_all([one], in_line=True) for one in items))
    assert answers == [[one] for one in items]
    await batcher.close()


class Text:
    """An item, which weak references may follow."""


@pytest.mark.trial
async def test_a_failed_statement_leaves_no_text_for_the_garbage_collector(bench: Bench) -> None:
    """Collections are rare: with the service's settings, minutes may pass until one frees a cycle."""

    async def fail(_connection: Connection, items: Sequence[Text], _resent: bool) -> Sequence[Text]:
        raise LookupError

    batcher: Batcher[Text, Text] = Batcher(bench.database, fail, max_items=100, retry_seconds=5)

    async def submit() -> "weakref.ref[Text]":
        text = Text()
        try:
            await batcher.submit(text)
        except LookupError:
            return weakref.ref(text)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        texts = await asyncio.gather(*(submit() for _ in range(3)))
        await asyncio.sleep(0)
        assert [text() for text in texts] == [None] * 3
    finally:
        gc.enable()
    await batcher.close()


async def test_an_item_that_times_out_stops_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large one fails in the end; a small one waits for what blocks it, and is not lost."""
    monkeypatch.setattr("app.core.database._LONGEST_PAUSE", 0.05)
    large, small, (a, b, c, d) = 2 * MEBIBYTE, 70_000, range(80_000, 80_004)
    statement = Sizes({large: math.inf, small: 6})
    answers = await commit_all(bench.database, statement, [a, b, large, c, small, d])
    assert isinstance(answers.pop(2), StatementTimeoutError)
    assert answers == [a, b, c, small, d]
    assert statement.batches[:3] == [[a, b, large, c, small, d]] * 2 + [[a]]
    assert statement.batches[3:7] == [[b], [large], [c], [small]]
    assert statement.batches.count([large]) == _MAX_LONE_TIMEOUTS


async def test_an_end_that_always_times_out_ends_without_its_text(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.core.database._LONGEST_PAUSE", 0.05)
    end_attempts = finish.end_attempts

    async def slow_for_large_texts(
        connection: Connection, worker: UUID, ends: Sequence[AttemptEnd], *rest: Any, **more: Any
    ) -> list[bool]:
        if any(end.output == text for end in ends):
            raise TimeoutError
        return await end_attempts(connection, worker, ends, *rest, **more)

    monkeypatch.setattr(finish, "end_attempts", slow_for_large_texts)
    text = "x" * 2 * MEBIBYTE
    worker = await bench.worker()
    await bench.add(3)
    large, *others = await bench.claim(worker)
    writer = EndWriter(bench.queue, worker, None)
    ends = [ended(large, output=text), *(ended(claim) for claim in others)]
    assert await asyncio.gather(*map(writer.write, ends)) == [True] * 3
    await writer.close()
    row = await bench.row(large.id)
    assert (row["state"], row["error_code"], row["output"]) == ("failed", "internal_error", "")
    for claim in others:
        assert (await bench.row(claim.id))["state"] == "completed"


def test_choices_share_the_prompt_of_their_request() -> None:
    prompt = "x" * MEBIBYTE
    first = make_result(prompt=prompt)
    choices = [replace(first, id=new_id()) for _ in range(128)]
    other = make_result()
    _, arguments = to_statement([*choices, other], [False] * 129, None)
    assert arguments.pop() == [prompt]
    assert not any(isinstance(column, Sequence) and prompt in column for column in arguments)
    assert enqueue_bytes(choices) < 2 * MEBIBYTE


def test_the_prompts_of_all_choices_are_bounded() -> None:
    """Each one is stored; of the longest prompt, sixteen."""
    check_choices(16 * MAX_PROMPT_CHARACTERS, 16)
    with pytest.raises(InvalidRequestError, match="n: the prompts"):
        check_choices(17 * MAX_PROMPT_CHARACTERS, 17)


async def test_each_choice_is_stored_with_its_prompt(bench: Bench) -> None:
    one, other = make_result(prompt="one"), make_result(prompt="two")
    results = [one, replace(one, id=new_id()), other, make_result()]
    assert all(await bench.queue.enqueue(results))
    prompts = [(await bench.row(result.id))["prompt"] for result in results]
    assert prompts == ["one", "one", "two", None]
