"""Both clients have the same methods, and send what they document."""

import inspect
import json

import httpx
import pytest

from llm_api_client import (
    APIStatusError,
    AsyncClient,
    Client,
    ConnectionFailedError,
    client as clients,
)
from llm_api_client.schemas import Result

RESULT = {"id": "r", "state": "completed", "model_name": "m", "result": "text", "new": "member"}


def public(kind: type) -> dict[str, object]:
    return {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize(
    "name", ["", "Contexts", "Models", "Attributions", "Servers", "Launches", "Webhooks"]
)
def test_both_clients_have_the_same_methods(name: str) -> None:
    one = public(getattr(clients, name or "Client"))
    other = public(getattr(clients, f"Async{name}" if name else "AsyncClient"))
    assert list(one) == list(other)
    for method, value in one.items():
        assert inspect.getdoc(value), method
        assert inspect.getdoc(value) == inspect.getdoc(other[method])
        parameters = inspect.signature(value).parameters  # type: ignore[arg-type]
        assert list(parameters) == list(inspect.signature(other[method]).parameters)  # type: ignore[arg-type]
        assert next(iter(parameters)) == "self"


def recorded(
    requests: list[httpx.Request], *answers: httpx.Response | Exception
) -> httpx.MockTransport:
    left = list(answers)

    def handle(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return httpx.MockTransport(handle)


def test_a_lost_send_is_repeated_under_its_key() -> None:
    requests: list[httpx.Request] = []
    transport = recorded(requests, httpx.ReadError("reset"), httpx.Response(202, json=RESULT))
    with Client("https://x", "secret", transport=transport) as client:
        result = client.send("p", model="m", parameters={"max_tokens": 3}, priority=None)
    assert result.checked().text == "text"
    keys = {request.headers["idempotency-key"] for request in requests}
    assert (len(requests), len(keys)) == (2, 1)
    assert json.loads(requests[1].content) == {
        "model": "m", "parameters": {"max_tokens": 3}, "content": "p",
    }  # fmt: skip
    assert requests[0].headers["authorization"] == "Bearer secret"


def test_a_redirect_does_not_take_the_key_elsewhere() -> None:
    requests: list[httpx.Request] = []
    moved = httpx.Response(302, headers={"Location": "http://evil.example/"})
    with (
        Client("https://x", "secret", transport=recorded(requests, moved)) as client,
        pytest.raises(APIStatusError, match="302"),
    ):
        client.get("r")
    assert len(requests) == 1


def test_each_item_of_a_list_has_a_key() -> None:
    requests: list[httpx.Request] = []
    problem = {"status": 422, "code": "invalid_request", "detail": "d", "title": "t"}
    transport = recorded(requests, httpx.Response(202, json=[RESULT, problem]))
    with Client("http://x", transport=transport) as client:
        outcomes = client.send_many(
            ["a", {"content": "b", "model": "n", "idempotency_key": "k"}], model="m"
        )
        assert client.send_many([], model="m") == []
    bodies = json.loads(requests[0].content)
    assert [body["model"] for body in bodies] == ["m", "n"]
    assert bodies[1]["idempotency_key"] == "k"
    assert len(bodies[0]["idempotency_key"]) == 32
    assert isinstance(outcomes[0], Result)
    assert isinstance(outcomes[1], Exception)


def test_a_list_reads_its_pages_when_they_are_needed() -> None:
    requests: list[httpx.Request] = []
    link = {"Link": '</results/?limit=2&after=r2>; rel="next"'}
    transport = recorded(
        requests,
        httpx.Response(200, json=[RESULT, RESULT], headers=link),
        httpx.Response(200, json=[RESULT]),
    )
    with Client("http://x", transport=transport) as client:
        results = client.list(state="completed", model="m")
        assert requests == []
        next(results)
        assert len(requests) == 1
        assert len(list(results)) == 2
    assert dict(requests[1].url.params) == {
        "state": "completed", "model_name": "m", "limit": "200", "after": "r2",
    }  # fmt: skip


async def test_the_awaited_client_repeats_too() -> None:
    requests: list[httpx.Request] = []
    transport = recorded(requests, httpx.Response(503), httpx.Response(200, json=RESULT))
    async with AsyncClient("http://x", transport=transport) as client:
        assert (await client.get("r/../x")).id == "r"
    assert requests[0].url.raw_path == b"/results/r%2F..%2Fx"


async def test_no_service_is_an_error_in_time() -> None:
    with Client("http://127.0.0.1:9", patience=0.5) as client, pytest.raises(ConnectionFailedError):
        client.me()
    async with AsyncClient("http://127.0.0.1:9", patience=0) as other:
        with pytest.raises(ConnectionFailedError):
            await other.me()


STREAM = (
    b'event: attempt\nid: 1:0\ndata: {"attempt":1}\n\n'
    b'event: delta\nid: 1:2\ndata: {"text":"ab","offset":0}\n\n'
    b'event: attempt\nid: 2:1\ndata: {"attempt":2,"continued_from":1}\n\n'
    b'event: delta\nid: 2:2\ndata: {"text":"c","offset":1}\n\n'
    b'event: completed\nid: 2:3\ndata: {"id":"r","state":"completed","model_name":"m","result":"ac"}\n\n'
)


async def test_a_stream_is_shown_as_it_arrives(capsys: pytest.CaptureFixture[str]) -> None:
    printed = "ab\n--- attempt 2, from character 1 ---\nc\n"
    with Client("http://x", transport=recorded([], httpx.Response(200, content=STREAM))) as client:
        assert client.stream("r").show().text == "ac"
    assert capsys.readouterr().out == printed
    transport = recorded([], httpx.Response(200, content=STREAM))
    async with AsyncClient("http://x", transport=transport) as other:
        assert (await other.stream("r").show()).text == "ac"
    assert capsys.readouterr().out == printed
