"""Results of a worker in a session with their model: live and joined texts, cancellation, unloading."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from app.core.settings import Settings
from app.inference import triton_session
from app.results.streams.hub import RunningAttempt
from tests.conftest import Service
from tests.integration.stream_reader import Reader
from tests.integration.support import finish, read, send, serve, until

ENDLESS = "endless {{chunks=50000 delay_ms=20}}"
MANY: dict[str, Any] = {"max_tokens": 50_000}


@pytest.fixture
async def joining(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process; text that is not read is joined for longer than any test."""
    settings = settings.model_copy(update={"flush_seconds": 3600.0})
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


async def until_begun(service: Service, result_id: str) -> RunningAttempt:
    """The attempt of a result once it has a token."""

    async def begun() -> RunningAttempt | None:
        attempt = service.services.hub.running(UUID(result_id))
        return attempt if attempt is not None and attempt.completion_tokens else None

    found: RunningAttempt = await until(begun)
    return found


@pytest.mark.trial
async def test_the_text_of_a_result_is_joined_until_a_stream_reads_it(joining: Service) -> None:
    unread = await until_begun(joining, (await send(joining, ENDLESS, parameters=MANY))["id"])
    first = unread.completion_tokens
    reader = Reader()
    sent = await send(joining, "read {{chunks=150 delay_ms=20}}")
    await asyncio.wait_for(reader.read(joining.client, sent["id"]), 60)
    assert reader.deltas > 10, "the text came in one piece"
    assert unread.completion_tokens == first, "nothing reads it"
    late = Reader()
    await asyncio.wait_for(late.read(joining.client, str(unread.claim.id), most=20), 60)
    assert late.deltas > 10
    assert unread.completion_tokens > first
    await joining.client.post(f"/results/{unread.claim.id}/cancel")


async def test_a_result_that_is_cancelled_while_its_text_is_joined_keeps_it(
    joining: Service,
) -> None:
    cancelled = await until_begun(joining, (await send(joining, ENDLESS, parameters=MANY))["id"])
    first = cancelled.completion_tokens
    other = await send(joining, "other {{chunks=40 delay_ms=20}}")
    assert (await read(joining, other["id"], wait=60))["state"] == "completed"
    assert cancelled.completion_tokens == first
    result_id = str(cancelled.claim.id)
    await joining.client.post(f"/results/{result_id}/cancel")
    result = await read(joining, result_id, wait=30)
    assert result["error"]["code"] == "cancelled"
    tokens = result["usage"]["completion_tokens"]
    assert tokens >= first + 20, "the joined text is lost"
    whole = await finish(joining, ENDLESS.replace("20", "0"), parameters={"max_tokens": tokens})
    assert len(result["result"].split(" ")) == len(whole["result"].split(" ")) == tokens


async def test_results_on_a_model_share_a_session(joining: Service) -> None:
    sent = [await send(joining, f"{n} {{{{chunks=5 delay_ms=5}}}}") for n in range(10)]
    results = [await read(joining, one["id"], wait=60) for one in sent]
    assert {result["state"] for result in results} == {"completed"}
    assert [len(result["result"].split(" ")) for result in results] == [5] * 10
    (server,) = joining.services.server_pool.servers
    (session,) = server.client._sessions.values()
    assert (session.model, session.is_open) == ("scripted", True)
    assert next(session._numbers) >= 11  # a probe is one more, where the machine pauses


@pytest.mark.trial
async def test_a_model_with_an_idle_session_is_unloaded_and_loaded_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The session ends since the model is not ready, long before it has been idle for its time.

    Triton takes two seconds to unload and load a model.
    """
    monkeypatch.setattr(triton_session, "_IDLE_SECONDS", 3600.0)
    await finish(service, "x {{chunks=2}}")
    (server,) = service.services.server_pool.servers
    (session,) = server.client._sessions.values()
    try:
        await server.client.unload("scripted")

        async def is_unloaded() -> bool:
            return any(entry.reason == "unloaded" for entry in await server.client.index())

        await until(is_unloaded, 60)
        assert not session.is_open
    finally:
        await server.client.load("scripted")
    result = await finish(service, "x {{chunks=2}}")
    assert result["state"] == "completed"
    assert server.client._sessions["scripted"] is not session


@pytest.mark.trial
async def test_a_model_is_unloaded_after_the_last_result_of_its_session(one: Service) -> None:
    """A stream reads it, in more responses than a model sends without an acknowledgement.

    Triton takes two seconds to unload and load a model.
    """
    (server,) = one.services.server_pool.servers
    sent = await send(one, "x {{chunks=100 delay_ms=20}}", parameters={"max_tokens": 100})
    reader = Reader()
    reading = asyncio.create_task(reader.read(one.client, sent["id"]))
    try:
        await until_begun(one, sent["id"])
        await server.client.unload("scripted")

        async def is_unloaded() -> bool:
            return any(entry.reason == "unloaded" for entry in await server.client.index())

        await until(is_unloaded, 60)
        await reading
    finally:
        await server.client.load("scripted")
    assert reader.result is not None
    assert (reader.result["state"], reader.attempts) == ("completed", [1])
    assert reader.text == reader.result["result"]
    assert len(reader.text.split(" ")) == 100
