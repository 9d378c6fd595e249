"""Generations of a session that are aborted in the engine, and their ends."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.vllm_backend.modules import load_session

module = load_session()

CANCELLED = "CANCELLED: the generation was cancelled"


class Engine:
    """Requests to an engine that adds a generation once it may; a cancelled one is added all the same."""

    def __init__(self) -> None:
        self.host = SimpleNamespace(
            loop=asyncio.get_running_loop(), engine=self, default_sampling={}, is_dead=False
        )
        self.model_name = "m"
        self.rendered = asyncio.Event()
        self.may_render = asyncio.Event()
        self.may_add = asyncio.Event()
        self.is_adding = asyncio.Event()
        self.added: list[str] = []
        self.aborted: list[str] = []

    def next_id(self) -> str:
        return f"m-{len(self.added) + 1}"

    def check_lora(self, _request: Any) -> None: ...

    async def render(self, _request: Any) -> tuple[dict[str, Any], int]:
        return {}, 3

    async def add(self, _request: Any, _prompt: Any, engine_id: str) -> Any:
        self.added.append(engine_id)
        self.is_adding.set()
        await self.may_add.wait()
        return SimpleNamespace(output=None, put=None)

    async def abort(self, engine_ids: list[str]) -> None:
        self.aborted += engine_ids


class Stream:
    """A client that leaves once it is asked to, and the threads that send to it."""

    def __init__(self) -> None:
        self.has_left = False
        self.sent: list[Any] = []

    def is_cancelled(self) -> bool:
        return self.has_left

    def send(self, response: Any, is_final: bool = False) -> None:
        self.sent.append((response, is_final))

    def start(self, _send: Any, outputs: list[Any]) -> asyncio.Future[None]:
        self.sent += outputs
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    async def run(self, work: Callable[..., Any], *arguments: Any) -> Any:
        return work(*arguments)


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
async def engine() -> Engine:
    return Engine()


@pytest.fixture
async def session(engine: Engine, stream: Stream, monkeypatch: pytest.MonkeyPatch) -> Any:
    sampling = SimpleNamespace(logprobs=None)
    request = SimpleNamespace(sampling=sampling, resumed=None)
    monkeypatch.setattr(module, "make_request", lambda *_: request)
    return module.Session(module.Open(1.0, None), stream, engine, stream, lambda: None)


async def settle() -> None:
    """Let every task run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def submit(session: Any, engine: Engine, slot: int) -> None:
    """Submit a generation; it is about to be added to the engine."""
    engine.is_adding.clear()
    session.run([module.Submit(slot, "x", {}, live=False, token_ids=False, resume=None)])
    await asyncio.wait_for(engine.is_adding.wait(), 20)


async def test_a_generation_that_is_cancelled_while_it_is_added_leaves_the_engine(
    session: Any, engine: Engine, stream: Stream
) -> None:
    await submit(session, engine, 1)
    session.run([module.Cancel([1, 7])])
    await settle()
    assert engine.aborted == engine.added == ["m-1"]
    (output,) = stream.sent
    assert (output.slot, output.event["error"]) == (1, CANCELLED)
    assert (session.slots, session.tasks) == ({}, {})


async def test_a_generation_that_is_cancelled_in_the_engine_ends_with_its_last_output(
    session: Any, engine: Engine, stream: Stream
) -> None:
    for slot in (1, 2, 3):
        await submit(session, engine, slot)
    engine.may_add.set()
    await settle()
    session.run([module.Cancel([1, 2])])
    await settle()
    assert (engine.aborted, stream.sent, list(session.slots)) == (["m-1", "m-2"], [], [1, 2, 3])
    for slot, reason in ((1, "abort"), (2, "stop"), (3, "abort")):
        session.finish(session.slots[slot], reason)
    await settle()
    ends = [
        (one.slot, one.event.get("error"), one.event.get("finish_reason")) for one in stream.sent
    ]
    assert ends == [(1, CANCELLED, None), (2, None, "stop"), (3, None, "abort")]
    assert engine.aborted == ["m-1", "m-2"]


async def test_a_client_that_leaves_takes_its_generations_out_of_the_engine(
    session: Any, engine: Engine, stream: Stream
) -> None:
    engine.may_add.set()
    await submit(session, engine, 1)
    await settle()
    engine.may_add.clear()
    await submit(session, engine, 2)
    stream.has_left = True
    await asyncio.wait_for(session.serve(), 20)
    await settle()
    assert sorted(engine.aborted) == engine.added == ["m-1", "m-2"]
    assert stream.sent == [(None, True)]
