"""Tenstorrent's inference API, on the scripted model: its mock server."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import finish, read, send, serve, until, write_model

HELLO = "hi {{chunks=4}}"
ROUTE = "/inference/scripted"


async def infer(service: Service, path: str = ROUTE, **body: Any) -> httpx.Response:
    return await service.client.post(path, json={"text": HELLO} | body)


async def result_of(service: Service, answer: httpx.Response) -> dict[str, Any]:
    return await read(service, answer.headers["x-result-id"])


def assert_error(answer: httpx.Response, status: int) -> str:
    assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json")
    error = answer.json()
    assert set(error) == {"status_code", "message"}
    assert error["status_code"] == status
    message: str = error["message"]
    assert message
    return message


@pytest.mark.parametrize("path", [ROUTE, "/inference"])
async def test_the_text_is_raw_and_stored(service: Service, path: str) -> None:
    answer = await infer(service, path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    result = await result_of(service, answer)
    native = await finish(service, HELLO, parameters=result["parameters"])
    assert answer.text == result["result"] == native["result"]
    assert result["parameters"] == {
        "temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_tokens": 128,
    }  # fmt: skip
    context = await service.client.get(f"/contexts/{result['context_id']}")
    assert context.json()["content"] == HELLO


@pytest.mark.trial
async def test_the_text_comes_in_chunks(settings: Settings) -> None:
    async with serve(settings, with_worker=True) as service:
        body = {"text": "hi {{chunks=50 delay_ms=60}}"}
        async with service.client.stream("POST", ROUTE, json=body) as answer:
            assert answer.headers["transfer-encoding"] == "chunked"
            chunks = [chunk async for chunk in answer.aiter_text()]
        assert len(chunks) > 1
        assert "".join(chunks) == (await result_of(service, answer))["result"]


async def test_numbers_may_be_strings(service: Service) -> None:
    given: dict[str, Any] = {
        "temperature": "0.7", "top_k": "10", "top_p": " 0.5 ", "max_tokens": 3.0,
        "stop_sequence": None, "return_prompt": None, "session_id": "x", "unknown": 1,
    }  # fmt: skip
    result = await result_of(service, await infer(service, **given))
    assert result["parameters"] == {
        "temperature": 0.7, "top_k": 10, "top_p": 0.5, "max_tokens": 3,
    }  # fmt: skip
    assert result["finish_reason"] == "length"


async def test_a_text_that_ends_it(service: Service) -> None:
    said = "{{text=one two three}}"
    assert (await infer(service, text=said, stop_sequence=" three")).text == "one two"
    assert (await infer(service, text=said, stop_sequence="")).text == "one two three"


@pytest.mark.parametrize("flag", [True, "true", "1"])
async def test_the_prompt_comes_first_on_request(service: Service, flag: object) -> None:
    text = (await infer(service)).text
    assert (await infer(service, return_prompt=flag)).text == HELLO + text
    assert (await infer(service, return_prompt="false")).text == text


async def test_the_default_length_fits_the_model(settings: Settings, tmp_path: Path) -> None:
    write_model(tmp_path, "scripted", max_model_len=20)
    small = settings.model_copy(update={"model_repository": tmp_path})
    async with run_service(small, with_worker=True) as service:
        result = await result_of(service, await infer(service, text="a b c"))
        assert result["parameters"]["max_tokens"] == 17
        message = assert_error(await infer(service, text="a b c", max_tokens=18), 400)
        assert "at most 17 are left" in message
        assert_error(await infer(service, text="a " * 30), 400)


async def test_values_that_are_refused(api: Service) -> None:
    """By Tenstorrent's rules, and by the bounds of the engine's parameters."""
    for body, message in (
        ({"text": ""}, "required 'text' parameter is either empty or not provided"),
        (
            {"stop_sequence": "x" * 257},
            "Parameter: stop_sequence: String should have at most 256 characters.",
        ),
    ):
        for path in (ROUTE, "/inference"):
            assert assert_error(await infer(api, path, **body), 400) == message
    assert (await api.client.get("/results/")).json() == []


async def test_bodies_that_are_not_json(api: Service) -> None:
    headers = {"content-type": "application/json"}
    for content in (b"", b"{", b"[]", b'"text"', b'{"text": "\\ud800"}', b"\xff"):
        answer = await api.client.post(ROUTE, content=content, headers=headers)
        assert assert_error(answer, 400) == "Request was not JSON"
    answer = await api.client.post(ROUTE, data={"text": "x"})
    assert assert_error(answer, 400) == "Request was not JSON"
    missing = "required 'text' parameter is either empty or not provided"
    assert assert_error(await api.client.post(ROUTE, json={}), 400) == missing
    assert "nobody" in assert_error(await infer(api, "/inference/nobody"), 404)
    assert_error(await api.client.get(ROUTE), 405)


async def test_a_full_queue_is_a_503(api: Service) -> None:
    full = api.services.settings.model_copy(update={"max_queued": 1})
    async with run_service(full, with_worker=False) as running:
        await send(running, "x")
        answer = await infer(running)
        assert assert_error(answer, 503) == "Service overloaded, try again later."
        assert int(answer.headers["retry-after"]) > 0


async def test_what_fails_before_the_first_byte_has_a_status(service: Service) -> None:
    answer = await infer(service, text="{{fail_at=0 chunks=3}}")
    assert_error(answer, 502)
    assert (await result_of(service, answer))["error"]["code"] == "model_error"
    assert "refuses" in assert_error(await infer(service, text="{{refuse}}"), 400)


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker behind a port."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.mark.parametrize("fault", ["fail_at", "lost_at"])
async def test_what_fails_after_it_cuts_the_connection(one: Service, fault: str) -> None:
    """A text that looks whole must be whole."""
    body = {"text": f"x {{{{chunks=9 delay_ms=50 {fault}=3}}}}"}
    async with one.client.stream("POST", ROUTE, json=body) as answer:
        assert answer.status_code == 200
        chunks = answer.aiter_text()
        assert await anext(chunks)
        with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
            _ = [chunk async for chunk in chunks]
    result = await read(one, answer.headers["x-result-id"], wait=30)
    assert result["error"]["code"] == {"fail_at": "model_error", "lost_at": "cancelled"}[fault]


@pytest.mark.parametrize("policy", ["cancel", "continue"])
async def test_a_tenstorrent_client_that_leaves(one: Service, policy: str) -> None:
    headers = {"X-On-Disconnect": policy} if policy == "continue" else {}
    count = 200 if policy == "cancel" else 20
    body = {"text": f"slow {{{{chunks={count} delay_ms=50}}}}", "max_tokens": 200}

    async def running() -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = (await one.client.get("/results/")).json()
        return [result for result in results if result["started_at"]]

    async with httpx.AsyncClient(base_url=one.client.base_url) as client:
        asking = asyncio.create_task(client.post(ROUTE, json=body, headers=headers))
        (result,) = await until(running)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    ended = await read(one, result["id"], wait=30)
    if policy == "cancel":
        assert ended["error"]["code"] == "cancelled"
    else:
        assert ended["usage"]["completion_tokens"] == count
