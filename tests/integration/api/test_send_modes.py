"""Responses to a send: at once, at the end, as a stream; and the effect of a disconnect."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from httpx_sse import aconnect_sse

from app.core.errors import DatabaseUnavailableError
from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.results.test_streams import one, reader_side, script
from tests.integration.stream_reader import Reader
from tests.integration.support import assert_problem, finish, read, send, serve, until

STREAM = {"Accept": "text/event-stream"}
CANCEL = {"X-On-Disconnect": "cancel"}
WAIT = {"Prefer": "wait=30"}
_TRIES = 5


def body(chunks: int, delay: float = 0.01) -> dict[str, Any]:
    return {"model": "scripted", "content": script(chunks, delay)}


def id_of(response: httpx.Response) -> str:
    return response.headers["location"].removeprefix("/results/")


@pytest.mark.parametrize("path", ["/results/", "/models/send/scripted/{}"])
@pytest.mark.trial
async def test_answered_by_its_stream(one: Service, path: str) -> None:
    saved = await one.client.post("/contexts/", json={"content": script(20)})
    path = path.format(saved.json()["id"])
    content = body(150, 0.02) if path == "/results/" else None
    reader = Reader()
    async with aconnect_sse(one.client, "POST", path, json=content, headers=STREAM) as source:
        async for event in source.aiter_sse():
            reader.take(event)
    assert source.response.status_code == 200
    assert reader.result is not None
    assert reader.result["id"] == id_of(source.response)
    assert reader.text == reader.result["result"]
    assert reader.deltas >= 10


async def test_the_stream_of_a_retry_and_of_a_repeated_request(one: Service) -> None:
    first = await finish(one, script(3))
    retried = await one.client.post(f"/results/{first['id']}/retry", headers=STREAM)
    assert id_of(retried) != first["id"]
    assert "event: completed" in retried.text
    key = {"Idempotency-Key": "k"}
    sent = await one.client.post("/results/", json=body(3), headers=key)
    again = await one.client.post("/results/", json=body(3), headers=key | STREAM)
    assert id_of(again) == sent.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert "event: completed" in again.text


@pytest.mark.parametrize(
    ("accept", "is_stream"),
    [
        ("application/json, text/event-stream", True),
        ("Text/Event-Stream; charset=utf-8 ; q=0.1", True),
        ("text/event-stream;q=0", False),
        ("text/event-stream; charset=utf-8; q=0.000, */*", False),
        ("text/event-stream-2", False),
        ("*/*", False),
    ],
)
async def test_streams_are_for_those_who_accept_them(
    one: Service, accept: str, *, is_stream: bool
) -> None:
    answer = await one.client.post("/results/", json=body(2), headers={"Accept": accept})
    assert answer.headers["content-type"].startswith(
        "text/event-stream" if is_stream else "application/json"
    )


async def test_what_is_refused_is_a_problem(one: Service) -> None:
    for headers in ({}, STREAM, WAIT):
        refused = await one.client.post("/results/", json={"model": "x"}, headers=headers)
        assert_problem(refused, 422, "invalid_request")
    wrong = await one.client.post("/results/", json=body(3), headers={"X-On-Disconnect": "x"})
    assert_problem(wrong, 422, "invalid_request", "X-On-Disconnect")
    assert (await one.client.get("/results/")).json() == []


async def test_no_room_for_a_stream_stores_nothing(settings: Settings) -> None:
    small = settings.model_copy(update={"max_streams": 1})
    async with serve(small, with_worker=True) as service:
        sent = await send(service, script(200, 0.05))
        async with service.client.stream("GET", f"/results/{sent['id']}/stream"):
            refused = await service.client.post("/results/", json=body(3), headers=STREAM)
            assert_problem(refused, 503, "too_many_streams")
        assert len((await service.client.get("/results/")).json()) == 1
        await service.client.post(f"/results/{sent['id']}/cancel")


@pytest.mark.trial
async def test_no_more_streams_than_allowed_when_all_send_at_once(settings: Settings) -> None:
    small = settings.model_copy(update={"max_streams": 3})
    async with serve(small, with_worker=True) as service:

        async def status() -> int:
            answer = await service.client.post("/results/", json=body(150, 0.02), headers=STREAM)
            return answer.status_code

        statuses = await asyncio.gather(*(status() for _ in range(12)))
        assert sorted(statuses) == [200] * 3 + [503] * 9
        assert len((await service.client.get("/results/")).json()) == 3


# --- clients that leave ---------------------------------------------------------------------------


async def leave(service: Service, headers: dict[str, str], delay: float = 0.02) -> str:
    """Send a long prompt, and leave once it has text; the result's id."""
    before = {item["id"] for item in (await service.client.get("/results/")).json()}
    async with httpx.AsyncClient(base_url=service.client.base_url) as client:
        sending = asyncio.create_task(
            client.post("/results/", json=body(200, delay), headers=headers, timeout=60)
        )

        async def is_running() -> str | None:
            for item in (await service.client.get("/results/")).json():
                if item["id"] not in before and item["started_at"]:
                    return str(item["id"])
            return None

        result_id: str = await until(is_running)

        async def has_text() -> bool:
            return bool((await read(service, result_id, partial=True))["result"])

        await until(has_text)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return result_id


@pytest.mark.parametrize("mode", [STREAM, WAIT], ids=["stream", "wait"])
@pytest.mark.parametrize("side", ["one", "apart"])
async def test_cancelled_when_its_client_leaves(
    one: Service, reader_side: Service, mode: dict[str, str], side: str
) -> None:
    service = one if side == "one" else reader_side
    result = await read(service, await leave(service, mode | CANCEL, 0.2), wait=60)
    assert result["error"]["code"] == "cancelled"
    assert result["result"], "the text so far is kept"
    assert result["usage"]["completion_tokens"] < 200


@pytest.mark.parametrize("mode", [STREAM, WAIT], ids=["stream", "wait"])
@pytest.mark.trial
async def test_goes_on_when_its_client_leaves(one: Service, mode: dict[str, str]) -> None:
    result = await read(one, await leave(one, mode), wait=60)
    assert result["state"] == "completed"
    assert result["usage"]["completion_tokens"] == 200


@pytest.mark.trial
async def test_leaving_a_stream_while_the_database_is_away(
    one: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is not a bug: the result goes on, and the log has no traceback."""
    asked = asyncio.Event()

    async def away(*_: object, **__: object) -> int:
        asked.set()
        raise DatabaseUnavailableError("away")

    with monkeypatch.context() as patch:
        patch.setattr(one.services.queue, "cancel", away)
        result_id = await leave(one, STREAM | CANCEL)
        await asyncio.wait_for(asked.wait(), 30)
    assert (await read(one, result_id, wait=60))["state"] == "completed"
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_who_leaves_makes_room(settings: Settings, method: str) -> None:
    """A client that is gone does not keep its place among the waiters."""
    async with serve(settings.model_copy(update={"max_waiters": 2})) as api:
        sent = await send(api, script(3))
        path, content = ("/results/", body(3)) if method == "POST" else (
            f"/results/{sent['id']}?wait=30", None,
        )  # fmt: skip
        async with httpx.AsyncClient(base_url=api.client.base_url) as client:
            waiting = [
                asyncio.create_task(client.request(method, path, json=content, headers=WAIT))
                for _ in range(2)
            ]

            async def are_waiting(count: int) -> bool:
                return api.services.hub._waiters.count == count

            await until(lambda: are_waiting(2))
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: are_waiting(0))
        if method == "POST":  # and loses nothing
            assert len((await api.client.get("/results/?state=pending")).json()) == 3


async def test_staying_to_the_end_cancels_nothing(one: Service) -> None:
    for mode in (STREAM, WAIT):
        answer = await one.client.post("/results/", json=body(3), headers=mode | CANCEL)
        assert (await read(one, id_of(answer)))["state"] == "completed"


# --- polls ----------------------------------------------------------------------------------------


@pytest.mark.trial
async def test_etags(one: Service) -> None:
    sent = await send(one, script(150, 0.03))
    path = f"/results/{sent['id']}"

    async def is_running() -> str | None:
        answer = await one.client.get(path)
        return answer.headers["etag"] if answer.json()["started_at"] else None

    running: str = await until(is_running)
    same = await one.client.get(path, headers={"If-None-Match": running})
    assert (same.status_code, same.content) == (304, b"")
    assert same.headers["etag"] == running
    assert int(same.headers["retry-after"]) >= 1
    ended = await one.client.get(path, params={"wait": 30}, headers={"If-None-Match": running})
    assert ended.status_code == 200
    assert ended.json()["state"] == "completed"
    final = ended.headers["etag"]
    assert "retry-after" not in ended.headers
    for known in (final, f'"other", {final}', f"{running}, {final}"):
        same = await one.client.get(path, headers={"If-None-Match": known})
        assert same.status_code == 304
    waited = await one.client.get(path, params={"wait": 5}, headers={"If-None-Match": final})
    assert waited.status_code == 304
    other = await one.client.get(path, headers={"If-None-Match": '"other"'})
    assert json.loads(other.content) == ended.json()


async def test_a_waiting_answer_reads_no_more_than_it_must(one: Service) -> None:
    """The waiter subscribes before its result is stored: the statement that ends it hands it on.

    On a machine that stalls meanwhile, the waiter looks once. So one answer of several counts.
    """
    await finish(one, script(1))
    reads = 0
    get = one.services.results.get

    async def count(*arguments: Any) -> Any:
        nonlocal reads
        reads += 1
        return await get(*arguments)

    for _ in range(_TRIES):
        reads = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(one.services.results, "get", count)
            answer = await one.client.post("/results/", json=body(3), headers=WAIT)
        assert answer.json()["state"] == "completed"
        assert answer.json() == (await one.client.get(answer.headers["location"])).json()
        if reads == 0:
            return
    pytest.fail(f"each of {_TRIES} answers was read, the last one {reads} times")


__all__ = ["one", "reader_side"]  # fixtures
