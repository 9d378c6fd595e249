"""The first version of TGI's /generate, at its own path and, by a setting, at /generate."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.api.tgi.first_version import PATH
from app.core.settings import Settings
from tests.conftest import Service, run_service
from tests.integration.support import read, send

HELLO = "hi {{chunks=4}}"
OUT_OF_BOUNDS = [
    ({"temperature": 0}, "temperature must be strictly positive"),
    ({"top_p": 0}, "top_p must be > 0.0 and <= 1.0"),
    ({"top_p": 1.5}, "top_p must be > 0.0 and <= 1.0"),
    ({"top_k": -1}, "top_k must be >= 0"),
    ({"max_new_tokens": 513}, "max_new_tokens must be >= 0 and <= 512"),
    ({"max_new_tokens": -1}, "max_new_tokens must be >= 0 and <= 512"),
    ({"temperature": 200}, "`temperature` Input should be less than or equal to 100"),
    ({"top_k": "5"}, "`parameters.top_k` Input should be a valid integer"),
    ({"top_p": None}, "`parameters.top_p` Input should be a valid number"),
]


@pytest.fixture
async def first(settings: Settings) -> AsyncIterator[Service]:
    old = settings.model_copy(update={"tgi_generate": "first"})
    async with run_service(old, with_worker=True) as running:
        yield running


async def post(service: Service, path: str, **members: Any) -> httpx.Response:
    return await service.client.post(path, json=members)


async def stored(service: Service, path: str = PATH, **parameters: Any) -> dict[str, Any]:
    """The stored parameters of a generation."""
    answer = await post(service, path, inputs=HELLO, parameters=parameters)
    assert answer.status_code == 200, answer.text
    result = await read(service, answer.headers["x-result-id"])
    given: dict[str, Any] = result["parameters"]
    return given


def assert_error(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert set(error) == {"error"}
    text: str = error["error"]
    assert text
    return text


async def test_the_answer_is_a_list_with_the_prompt_before_the_text(first: Service) -> None:
    for path in ("/generate", PATH):
        answer = await post(first, path, inputs=HELLO)
        assert answer.status_code == 200, answer.text
        result = await read(first, answer.headers["x-result-id"])
        assert result["state"] == "completed"
        assert answer.json() == [{"generated_text": HELLO + result["result"]}]
        names = ("validation", "queue", "inference", "total")
        assert all(int(answer.headers[f"x-{name}-time"]) >= 0 for name in names)


async def test_the_setting_changes_one_path_only(service: Service, first: Service) -> None:
    assert isinstance((await post(service, "/generate", inputs=HELLO)).json(), dict)
    assert isinstance((await post(service, PATH, inputs=HELLO)).json(), list)
    streamed = await post(first, "/generate_stream", inputs=HELLO)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    refused = await first.client.post("/tokenize", json={})
    assert set(refused.json()) == {"error", "error_type"}
    assert (await first.client.get("/health")).content == b""


async def test_defaults_are_greedy_and_twenty_tokens(service: Service) -> None:
    greedy = {"max_tokens": 20, "temperature": 0.0}
    neutral: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "temperature": 1, "do_sample": False}
    assert await stored(service) == greedy
    assert await stored(service, **neutral) == greedy
    left_out = await post(service, PATH, inputs=HELLO)
    result = await read(service, left_out.headers["x-result-id"])
    assert result["parameters"] == greedy
    assert (await stored(service, max_new_tokens=0))["max_tokens"] == 1
    assert (await stored(service, max_new_tokens=512))["max_tokens"] == 512


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"do_sample": True, "top_p": 0.9}, (1.0, 0, 0.9)),
        ({"temperature": 0.5}, (0.5, 0, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
    ],
)
async def test_a_sample_has_the_first_versions_defaults_and_not_the_models(
    service: Service, parameters: dict[str, Any], expected: tuple[float, int, float]
) -> None:
    given = await stored(service, **parameters)
    assert (given["temperature"], given["top_k"], given["top_p"]) == expected


@pytest.mark.parametrize(("parameters", "text"), OUT_OF_BOUNDS)
async def test_values_out_of_their_bounds(
    first: Service, parameters: dict[str, Any], text: str
) -> None:
    for path in ("/generate", PATH):
        answer = await post(first, path, inputs=HELLO, parameters=parameters)
        assert assert_error(answer, 400).startswith(text)
    assert (await first.client.get("/results/")).json() == []


async def test_bodies_that_are_none(first: Service) -> None:
    for content in (b"", b"{", b"[]", b"{}", b'{"inputs": 1}', b'{"inputs": ""}'):
        headers = {"content-type": "application/json"}
        answer = await first.client.post("/generate", content=content, headers=headers)
        assert_error(answer, 400)
    assert_error(await first.client.post("/generate", content=b"inputs=x"), 415)
    assert_error(await first.client.put("/generate"), 405)
    assert_error(await post(first, "/generate", inputs="x", model="nobody"), 404)
    much = "x" * (first.services.settings.max_body_bytes + 1)
    assert_error(await post(first, "/generate", inputs=much), 413)
    null = await post(first, "/generate", inputs=HELLO, parameters=None)
    assert_error(null, 400)


async def test_generations_that_fail(first: Service) -> None:
    answer = await post(first, "/generate", inputs="{{fail_at=2 chunks=3}}")
    assert assert_error(answer, 500).startswith("Request failed during generation: ")
    result = await read(first, answer.headers["x-result-id"])
    assert result["error"]["code"] == "model_error"
    refused = await post(first, "/generate", inputs="{{refuse}}")
    assert "refuses" in assert_error(refused, 400)


async def test_an_unexpected_error_has_the_same_shape(
    first: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(first.services.registry), "choose", None)
    assert_error(await post(first, "/generate", inputs=HELLO), 500)


async def test_a_full_queue_is_an_overloaded_model(api: Service) -> None:
    full = api.services.settings.model_copy(update={"max_queued": 1})
    async with run_service(full, with_worker=False) as running:
        await send(running, "x")
        answer = await post(running, PATH, inputs=HELLO)
        assert assert_error(answer, 429) == "Model is overloaded"
        assert int(answer.headers["retry-after"]) > 0


async def test_a_repeated_key_returns_the_first_text(first: Service) -> None:
    body = {"inputs": HELLO, "parameters": {"do_sample": True}}
    key = {"Idempotency-Key": "one"}
    answers = [
        await first.client.post(path, json=body, headers=key) for path in ("/generate", PATH)
    ]
    assert answers[0].json() == answers[1].json()
    assert answers[0].headers["x-result-id"] == answers[1].headers["x-result-id"]
    assert len((await first.client.get("/results/")).json()) == 1
