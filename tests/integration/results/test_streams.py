"""Streams: live, resumed, from another process, to the end and behind it."""

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import orjson
import pytest

from app.core.settings import Settings
from app.queue.claim import Claim
from app.results.streams import hub as stream_hub_module, interest as watched_module
from app.worker.backends.triton_backend import Generation, TritonBackend
from tests.conftest import Service
from tests.integration.stream_reader import Reader
from tests.integration.support import (
    UNKNOWN_ID,
    assert_problem,
    finish,
    read,
    send,
    serve,
    until,
    until_running,
)


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def reader_side(settings: Settings, service: Service) -> AsyncIterator[Service]:
    """An API in front of a worker that is not its own: nothing is read from memory."""
    async with serve(settings) as other:
        yield other


def script(chunks: int, delay: float = 0.01) -> str:
    return f"{{{{chunks={chunks} delay_ms={delay * 1000:.0f}}}}} go"


@pytest.mark.trial
async def test_live(one: Service) -> None:
    sent = await send(one, script(150, 0.02))
    reader = Reader()
    await asyncio.wait_for(reader.read(one.client, sent["id"]), 30)
    assert reader.result is not None
    assert reader.result["state"] == "completed"
    assert reader.text == reader.result["result"]
    assert reader.attempts == [1]
    assert reader.deltas >= 10, "the text came in one piece"
    assert reader.position == f"1:{len(reader.text) + 1}"


@pytest.mark.trial
async def test_from_another_process(service: Service, reader_side: Service) -> None:
    sent = await send(service, script(120, 0.03))
    reader = Reader()
    await asyncio.wait_for(reader.read(reader_side.client, sent["id"]), 30)
    assert reader.result is not None
    assert reader.text == reader.result["result"]
    assert reader.deltas >= 15, "it came with the flushes, not with the deltas"


@pytest.mark.trial
async def test_readers_elsewhere_get_the_text_in_notifications(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Also one that comes when others have read much of it. All of it is stored."""
    never = settings.model_copy(update={"flush_seconds": 1000.0})
    async with (
        serve(never, with_worker=True) as near,
        serve(settings) as far,
        serve(settings) as late,
    ):
        sent = await send(near, script(120, 0.05))
        first, second = Reader(), Reader()
        reading = asyncio.create_task(first.read(far.client, sent["id"]))

        async def has_read_some() -> bool:
            return first.deltas >= 20

        await until(has_read_some)
        seen = first.text
        stored = await connection.fetchval(
            """SELECT string_agg(text, '' ORDER BY "offset") FROM result_chunks"""
        )
        assert stored.startswith(seen)
        async with asyncio.timeout(30):
            await asyncio.gather(reading, second.read(late.client, sent["id"]))
    for reader in (first, second):
        assert reader.result is not None
        assert reader.text == reader.result["result"]
        assert reader.attempts == [1]
    assert first.deltas >= 30  # a busy machine joins some of them
    assert second.deltas < first.deltas


@pytest.mark.trial
async def test_unwatched_results_cost_no_notification(
    service: Service, reader_side: Service, connection: asyncpg.Connection
) -> None:
    heard: list[object] = []
    await connection.add_listener("llm_appended", lambda *news: heard.append(news[-1]))
    await finish(service, script(60, 0.02))
    assert heard == []
    sent = await send(service, script(150, 0.02))
    await asyncio.wait_for(Reader().read(reader_side.client, sent["id"]), 30)
    await until(lambda: asyncio.sleep(0, heard))


@pytest.mark.parametrize("with_worker", [True, False])
async def test_resumed_at_every_event(settings: Settings, *, with_worker: bool) -> None:
    async with serve(settings, with_worker=True) as near, serve(settings) as far:
        await read_in_pieces(near if with_worker else far)


async def read_in_pieces(service: Service) -> None:
    sent = await send(service, script(25, 0.02))
    reader = Reader()
    async with asyncio.timeout(30):
        while reader.result is None:
            await reader.read(service.client, sent["id"], most=1)
    assert reader.text == reader.result["result"]
    assert reader.attempts == [1]
    again = await service.client.get(
        f"/results/{sent['id']}/stream", headers={"Last-Event-ID": reader.position or ""}
    )
    assert again.status_code == 204


async def test_after_completion_from_any_position(one: Service) -> None:
    result = await finish(one, script(12, 0))
    text = result["result"]
    for offset in (0, 1, 7, len(text) - 1, len(text)):
        reader = Reader(text=text[:offset], attempt=1, position=f"1:{offset}")
        await reader.read(one.client, result["id"])
        assert reader.text == text
        assert reader.result is not None
    path = f"/results/{result['id']}/stream"
    beyond = await one.client.get(path, params={"after": f"1:{len(text) + 50}"})
    assert beyond.text.count("event: completed") == 1
    assert "event: delta" not in beyond.text


async def test_deltas_count_the_tokens_so_far(one: Service) -> None:
    await check_counts(one)


async def test_deltas_from_the_table_count_them_as_well(reader_side: Service) -> None:
    await check_counts(reader_side)


async def check_counts(api: Service) -> None:
    sent = await send(api, script(30, 0.02))
    reader = Reader()
    await reader.read(api.client, sent["id"])
    counts = [count for _, count in reader.counts]
    assert counts == sorted(counts)
    assert counts[-1] == 30
    # Each word is a token: the usage counts the words sent by then.
    assert all(len(text.split()) == count for text, count in reader.counts)


async def test_the_wire(one: Service) -> None:
    result = await finish(one, "{{chunks=2}} go")
    answer = await one.client.get(f"/results/{result['id']}/stream")
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    length = len(result["result"])
    whole = {"text": result["result"], "offset": 0, "completion_tokens": 2}
    data = orjson.dumps(whole).decode()
    lines = re.sub(r',"age":\d+\.\d{1,3}}', "}", answer.text).split("\n")
    assert lines[:10] == [
        "retry: 1000",
        "event: attempt", "id: 1:0", 'data: {"attempt":1}', "",
        "event: delta", f"id: 1:{length}", f"data: {data}", "",
        "event: completed",
    ]  # fmt: skip
    assert lines[10] == f"id: 1:{length + 1}"
    assert json.loads(lines[11].removeprefix("data: ")) == result
    assert answer.text.endswith("\n\n")


async def test_cancelled_while_read(service: Service, reader_side: Service) -> None:
    sent = await send(service, script(500, 0.02))
    reader = Reader()
    reading = asyncio.create_task(reader.read(reader_side.client, sent["id"]))
    await until_running(service, sent["id"])
    await service.client.post(f"/results/{sent['id']}/cancel")
    await asyncio.wait_for(reading, 30)
    assert reader.result is not None
    assert reader.result["error"]["code"] == "cancelled"
    assert reader.text == reader.result["result"] != ""


async def test_cancelled_in_the_queue(settings: Settings) -> None:
    async with serve(settings) as api:
        sent = await send(api, script(5))
        reader = Reader()
        reading = asyncio.create_task(reader.read(api.client, sent["id"]))

        async def is_reading() -> bool:
            return api.services.hub._readers.count == 1

        await until(is_reading)
        await api.client.post(f"/results/{sent['id']}/cancel")
        await asyncio.wait_for(reading, 30)
        assert reader.attempts == []
        assert reader.position == "0:1"
        again = await api.client.get(f"/results/{sent['id']}/stream", params={"after": "0:1"})
        assert again.status_code == 204


async def test_deleted_while_read(service: Service, reader_side: Service) -> None:
    sent = await send(service, script(500, 0.02))
    reader = Reader()
    reading = asyncio.create_task(reader.read(reader_side.client, sent["id"]))
    await until_running(service, sent["id"])
    await service.client.delete(f"/results/{sent['id']}", params={"force": True})
    await asyncio.wait_for(reading, 30)
    assert not reader.is_over
    gone = await reader_side.client.get(f"/results/{sent['id']}/stream")
    assert_problem(gone, 404, "not_found")


async def test_wrong_positions(one: Service) -> None:
    result = await finish(one, script(3, 0))
    path = f"/results/{result['id']}/stream"
    for text in (
        "x",
        "1",
        "1:",
        ":1",
        "-1:0",
        "1:1:1",
        "1:99999999999999999",
        "1: 1",
        "\u0661:\u0662",
    ):
        assert_problem(
            await one.client.get(path, params={"after": text}), 422, "invalid_request", "after"
        )
    header = await one.client.get(path, headers={"Last-Event-ID": "nonsense"})
    assert_problem(header, 422, "invalid_request", "Last-Event-ID")
    later = await one.client.get(path, params={"after": "7:0"})
    assert_problem(later, 422, "invalid_request", "after")
    assert_problem(await one.client.get(f"/results/{UNKNOWN_ID}/stream"), 404, "not_found")
    assert_problem(await one.client.get("/results/x/stream"), 404, "not_found")


async def test_an_older_attempt_begins_anew(one: Service, connection: asyncpg.Connection) -> None:
    result = await finish(one, script(5, 0))
    await connection.execute("UPDATE results SET attempt = 3 WHERE id = $1", result["id"])
    reader = Reader(text="what was", attempt=2, position="2:8")
    await reader.read(one.client, result["id"])
    assert reader.attempts == [3]
    assert reader.text == result["result"]


async def test_too_many_streams(settings: Settings) -> None:
    small = settings.model_copy(update={"max_streams": 2})
    async with serve(small) as api, contextlib.AsyncExitStack() as stack:
        sent = await send(api, script(5))
        path = f"/results/{sent['id']}/stream"
        for _ in range(2):
            await stack.enter_async_context(api.client.stream("GET", path))
        problem = assert_problem(await api.client.get(path), 503, "too_many_streams")
        assert "LLM_MAX_STREAMS" in problem["detail"]
        await stack.aclose()

        async def is_free() -> bool:
            return api.services.hub._readers.count == 0

        await until(is_free)  # who leaves makes room


async def test_keep_alive(settings: Settings) -> None:
    often = settings.model_copy(update={"keep_alive_seconds": 0.1})
    async with serve(often) as api:
        sent = await send(api, script(5))
        async with api.client.stream("GET", f"/results/{sent['id']}/stream") as response:
            lines = response.aiter_lines()
            heard = [await anext(lines) for _ in range(2)]
        assert heard == [": keep-alive", ": keep-alive"]


@pytest.mark.trial
async def test_a_stopping_process_ends_its_streams(settings: Settings, service: Service) -> None:
    sent = await send(service, script(300, 0.02))
    reader = Reader()
    async with serve(settings) as other:
        reading = asyncio.create_task(reader.read(other.client, sent["id"]))
        await until(lambda: asyncio.sleep(0, reader.text))
        other.app.state.stop()
        await asyncio.wait_for(reading, 30)
    assert not reader.is_over
    assert reader.position is not None
    async with serve(settings) as third:  # and the reader goes on there
        await asyncio.wait_for(reader.read(third.client, sent["id"]), 30)
    assert reader.result is not None
    assert reader.text == reader.result["result"]


async def test_tickets(one: Service, connection: asyncpg.Connection) -> None:
    result = await finish(one, script(3, 0))
    other = await finish(one, script(4, 0))
    path = f"/results/{result['id']}/stream"
    issued = await one.client.post(f"{path}-ticket")
    assert issued.status_code == 201, issued.text
    ticket = issued.json()["ticket"]
    stored = await connection.fetchrow("SELECT * FROM stream_tickets")
    assert stored is not None
    assert ticket.encode() not in stored["ticket_hash"]

    wrong = await one.client.get(f"/results/{other['id']}/stream", params={"ticket": ticket})
    assert_problem(wrong, 403, "bad_ticket")
    opened = await one.client.get(path, params={"ticket": ticket})
    assert "event: completed" in opened.text
    assert_problem(await one.client.get(path, params={"ticket": ticket}), 403, "bad_ticket")
    assert_problem(await one.client.get(path, params={"ticket": "x"}), 403, "bad_ticket")

    late = (await one.client.post(f"{path}-ticket")).json()["ticket"]
    await connection.execute("UPDATE stream_tickets SET expires_at = now()")
    assert_problem(await one.client.get(path, params={"ticket": late}), 403, "bad_ticket")
    await one.client.post(f"{path}-ticket")
    await connection.execute("UPDATE stream_tickets SET expires_at = now()")
    await one.services.tickets.remove_expired()
    assert await connection.fetchval("SELECT count(*) FROM stream_tickets") == 0
    assert_problem(await one.client.post(f"/results/{UNKNOWN_ID}/stream-ticket"), 404, "not_found")


@pytest.mark.trial
async def test_an_outage_of_the_database_cuts_no_stream(
    service: Service, reader_side: Service, connection: asyncpg.Connection
) -> None:
    sent = await send(service, script(100, 0.02))
    reader = Reader()
    reading = asyncio.create_task(reader.read(reader_side.client, sent["id"]))
    await until_running(service, sent["id"])
    for _ in range(3):
        await connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
        await asyncio.sleep(0.3)  # new connections are lost, too
    await asyncio.wait_for(reading, 30)
    assert reader.result is not None
    assert reader.text == reader.result["result"]
    assert (await read(service, sent["id"]))["state"] == "completed"


@pytest.mark.trial
async def test_new_streams_do_not_silence_an_old_one(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that open all the time do not put off the announcement of those open before."""
    monkeypatch.setattr(stream_hub_module, "ANNOUNCE_SECONDS", 0.3)
    monkeypatch.setattr(watched_module, "_INTEREST_TTL_SECONDS", 0.9)
    seldom = settings.model_copy(update={"flush_seconds": 10.0})
    reader = Reader()
    async with serve(seldom, with_worker=True) as near, serve(settings) as far:
        sent = await send(near, script(120, 0.05))
        reading = asyncio.create_task(reader.read(far.client, sent["id"]))
        while not reading.done():
            other = await finish(near, script(1, 0))
            await Reader().read(far.client, other["id"])
            queued = await send(near, script(1, 0.05))
            await Reader().read(far.client, queued["id"])
        await reading
    assert reader.result is not None
    assert reader.text == reader.result["result"]
    assert reader.deltas >= 40, "it was forgotten"


async def test_an_attempt_that_was_lost_unnoticed_is_not_read(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """A process that slept runs the first attempt still, in its own belief; a reader knows better.

    It is shown the second one, live, and the process is not kept busy by the first.
    """
    async with serve(settings) as api:
        sent = await send(api, script(1))
        backend = TritonBackend(api.services.registry, api.services.server_pool, 30.0)
        claim = Claim(UUID(sent["id"]), 1, "scripted", "", {}, 60.0, is_suspect=False)
        lost = Generation(claim, backend, api.services.hub.on_text)
        lost.text.append("what was" * 2000)
        api.services.hub.attach(lost)
        announced = asyncio.Event()
        await connection.add_listener("llm_watched", lambda *_: announced.set())
        await connection.execute("UPDATE results SET attempt = 2 WHERE id = $1", claim.id)
        await connection.execute(
            """INSERT INTO result_chunks
                 (result_id, attempt, "offset", text, prompt_tokens, completion_tokens)
               VALUES ($1, 2, 0, 'what is', 1, 1)""",
            claim.id,
        )
        reader = Reader(text="what", attempt=2, position="2:4")
        await asyncio.wait_for(reader.read(api.client, sent["id"], most=1), 30)
        assert reader.text == "what is"
        await asyncio.wait_for(announced.wait(), 30)
        api.services.hub.detach(lost)


async def test_a_result_that_moves_to_another_process_is_announced(
    one: Service, connection: asyncpg.Connection
) -> None:
    """Read from memory at first, then handed back: its next worker must know who reads."""
    heard: list[object] = []
    await connection.add_listener("llm_watched", lambda *news: heard.append(news[-1]))
    sent = await send(one, script(200, 0.05))
    reader = Reader()
    reading = asyncio.create_task(reader.read(one.client, sent["id"]))
    await until_running(one, sent["id"])
    heard.clear()
    hub = one.services.hub
    attempt = hub.running(UUID(sent["id"]))
    assert attempt is not None
    hub.detach(attempt)

    async def is_announced() -> bool:
        return any(UUID(sent["id"]).hex in str(payload) for payload in heard)

    await until(is_announced)
    await one.client.post(f"/results/{sent['id']}/cancel")
    await asyncio.wait_for(reading, 30)


@pytest.mark.parametrize("with_worker", [True, False])
@pytest.mark.trial
async def test_opened_in_the_moment_of_completion(settings: Settings, *, with_worker: bool) -> None:
    """Hundreds of streams, opened about when their results end: none misses the end."""
    async with serve(settings, with_worker=True) as near, serve(settings) as far:
        side = near if with_worker else far

        async def read_late(number: int) -> None:
            sent = await send(near, f"{number} {script(3, 0.005)}")
            await asyncio.sleep(number % 30 * 0.002)  # about when the result ends
            reader = Reader()
            await asyncio.wait_for(reader.read(side.client, sent["id"]), 30)
            assert reader.result is not None
            assert reader.text == reader.result["result"] != ""
            again = await side.client.get(
                f"/results/{sent['id']}/stream", params={"after": reader.position or ""}
            )
            assert again.status_code == 204

        for first in range(0, 240, 8):
            await asyncio.gather(*(read_late(first + number) for number in range(8)))


# Outside the basic plane, combining, joined, right to left, line breaks of all kinds, controls.
_WORDS = (
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 e\u0301\u0327\u0323 \U0010ffff\U00010000 "
    "\u05e9\u05dc\u05d5\u05dd\u202e \ufeff\ufffe\uffff a\x01\x7f\x9f \u200b\u2060"
)


@pytest.mark.parametrize("with_worker", [True, False])
async def test_texts_of_all_kinds_of_characters(settings: Settings, *, with_worker: bool) -> None:
    """Cut at any event, offsets count code points and nothing is changed on the way."""
    async with serve(settings, with_worker=True) as near, serve(settings) as far:
        side = near if with_worker else far
        directive = f"{{{{delay_ms=15 text={_WORDS * 4}}}}}"
        for _ in range(5):  # if the machine stalls, a text of 0.4 s is read at once
            sent = await send(near, directive)
            reader = Reader()
            async with asyncio.timeout(30):
                while reader.result is None:
                    await reader.read(side.client, sent["id"], most=2)
            assert reader.text == reader.result["result"] == " ".join((_WORDS * 4).split())
            if reader.deltas > 8:
                break
        else:
            pytest.fail("no reading was live")
