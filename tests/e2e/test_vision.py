"""Images on real vLLM, with a tiny model that has vision."""

import asyncio
import base64
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.conftest import Service, make_settings
from tests.e2e.engine_metrics import read_metrics
from tests.e2e.small_models import SmallModels, engine_of
from tests.images import BLUE, RED, block, chat_part, data_uri, input_part, png, png_uri
from tests.integration.support import (
    anthropic_client,
    assert_problem,
    openai_client,
    read,
    serve,
    until,
)
from tests.postgres import PostgresServer
from tests.triton_streams import ModelError, ask, collect

pytestmark = pytest.mark.timeout(300)

IMAGES_OF_REQUESTS = ((png_uri(RED),), (png_uri(BLUE),), (png_uri(RED), png_uri(BLUE)), ())
MANY_TOKENS = 200
LENGTH = 512  # of the model
SAMPLING: dict[str, Any] = {"temperature": 0, "max_tokens": 2, "logprobs": 0}


@pytest.fixture(scope="module")
def eye(small_models: SmallModels, entries: dict[str, Path]) -> Iterator[SmallModels]:
    """Triton with the model `eye`."""
    with small_models.serving(entries, "eye"):
        yield small_models


@pytest.fixture
async def service(
    postgres_server: PostgresServer, database_name: str, eye: SmallModels
) -> AsyncIterator[Service]:
    settings = make_settings(postgres_server, database_name, eye, model_repository=eye.repository)
    async with serve(settings, with_worker=True) as running:
        yield running


def part(uri: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": uri}}


async def see(client: AsyncOpenAI, *uris: str) -> tuple[float, int]:
    """The first token's log probability in an answer to a question about images, and the prompt's tokens.

    The model is random: texts may be equal, and later tokens may differ by the last digits.
    """
    content: Any = [*map(part, uris), {"type": "text", "text": "What?"}]
    answer = await client.chat.completions.create(
        model="eye",
        messages=[{"role": "user", "content": content}],
        logprobs=True,
        temperature=0,
        max_tokens=2,
    )
    logprobs = answer.choices[0].logprobs
    assert answer.usage is not None
    assert logprobs is not None
    assert logprobs.content
    return logprobs.content[0].logprob, answer.usage.prompt_tokens


async def test_the_official_client_sends_images(service: Service) -> None:
    async with openai_client(service) as client:
        red, blue, both, none = [await see(client, *uris) for uris in IMAGES_OF_REQUESTS]
        again = await see(client, *IMAGES_OF_REQUESTS[0])
    assert len({round(one[0], 2) for one in (red, blue, both, none)}) == 4
    assert again[0] == pytest.approx(red[0], abs=1e-3)
    assert none[1] < red[1] == blue[1] < both[1]  # the engine counts the tokens of images


# Parts of a message, in the order in which the model reads them.
MIXED = (
    ("What?", png_uri(RED)),
    (png_uri(RED), "What?"),
    (png_uri(BLUE), "What?"),
    ("One", png_uri(BLUE), "and another", png_uri(RED), "what?"),
)


async def ask_by_chat(client: AsyncOpenAI, *parts: str) -> tuple[str, int, int]:
    """The text at temperature 0, and the tokens of the prompt and the text."""
    content: Any = list(map(chat_part, parts))
    answer = await client.chat.completions.create(
        model="eye",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        max_tokens=6,
    )
    assert answer.usage is not None
    text = answer.choices[0].message.content or ""
    return text, answer.usage.prompt_tokens, answer.usage.completion_tokens


async def test_a_message_has_the_text_of_chat(service: Service) -> None:
    async with openai_client(service) as client, anthropic_client(service) as messages:
        for parts in MIXED:
            content: Any = list(map(block, parts))
            message = await messages.messages.create(
                model="eye",
                messages=[{"role": "user", "content": content}],
                max_tokens=6,
                extra_body={"temperature": 0},
            )
            text = "".join(one.text for one in message.content if one.type == "text")
            usage = (message.usage.input_tokens, message.usage.output_tokens)
            expected = await ask_by_chat(client, *parts)
            assert (text.strip(), *usage) == (expected[0].strip(), *expected[1:])


async def test_a_response_has_the_text_of_chat(service: Service) -> None:
    async with openai_client(service) as client:
        for parts in MIXED:
            content: Any = list(map(input_part, parts))
            response = await client.responses.create(
                model="eye",
                input=[{"role": "user", "content": content}],
                temperature=0,
                max_output_tokens=6,
            )
            assert response.usage is not None
            usage = (response.usage.input_tokens, response.usage.output_tokens)
            assert (response.output_text, *usage) == await ask_by_chat(client, *parts)


async def test_tokens_of_images_are_counted_as_the_engine_does(service: Service) -> None:
    async with openai_client(service) as client, anthropic_client(service) as messages:
        for parts in MIXED:
            turn: Any = {"role": "user", "content": list(map(block, parts))}
            counted = await messages.messages.count_tokens(model="eye", messages=[turn])
            assert counted.input_tokens == (await ask_by_chat(client, *parts))[1]


async def test_an_open_length_is_what_the_images_leave(service: Service) -> None:
    """To the last token of the model's length; with one more the request is refused."""
    images = [{"url": png_uri(RED)}, {"url": png_uri(BLUE), "after": 2}]
    message = {"role": "user", "content": "What?", "images": images}
    body: dict[str, Any] = {"model": "eye", "messages": [message]}
    body["parameters"] = {"temperature": 0, "ignore_eos": True}
    answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
    result = answer.json()
    assert result["state"] == "completed", result
    left = result["parameters"]["max_tokens"]
    assert result["usage"]["completion_tokens"] == left
    assert result["usage"]["prompt_tokens"] + left == LENGTH
    assert result["parameters"]["images"]["tokens"] == 2 * 6  # 7 each, 1 of which is its place
    body["parameters"]["max_tokens"] = left + 1
    refused = await service.client.post("/results/", json=body)
    problem = assert_problem(refused, 422, "invalid_request", "parameters.max_tokens")
    assert f"at most {left} are left" in problem["detail"]


async def test_the_engine_reads_the_image_itself(service: Service, eye: SmallModels) -> None:
    """The first token is that of the rendered prompt with the image, asked of the engine directly."""
    for color in (RED, BLUE):
        message = {"role": "user", "content": "What?", "images": [{"url": png_uri(color)}]}
        body = {"model": "eye", "messages": [message], "parameters": SAMPLING}
        answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
        result = answer.json()
        assert result["state"] == "completed", result
        direct = await collect(eye, direct_request(png(color)))
        ours, theirs = result["logprobs"][0], json.loads(direct[0]["logprobs"][0])[0]
        assert ours.keys() == theirs.keys()
        for token, entry in ours.items():
            assert entry["logprob"] == pytest.approx(theirs[token]["logprob"], abs=1e-3)


def direct_request(image: bytes) -> Any:
    encoded = base64.b64encode(image).decode()
    prompt = "user: <image>What?assistant: "
    return ask("eye", prompt, SAMPLING, stream=True, return_logprobs=True, image=encoded)


async def test_requests_survive_an_engine_that_is_terminated(
    service: Service, eye: SmallModels
) -> None:
    """Each completes once, as in an undisturbed run; tests/e2e/test_engine_killed.py kills one."""
    undisturbed = await send_images(service)
    expected = [(await read(service, one, wait=60))["result"] for one in undisturbed]
    ids = await send_images(service)

    async def runs() -> bool:
        return (await read_metrics(eye))["vllm:num_requests_running"] > 0

    await until(runs)
    engine_of(eye, "eye").send_signal(signal.SIGTERM)
    assert "eye" in await asyncio.wait_for(eye.wait(), 60)
    await eye.start()
    results = [await read(service, one, wait=60) for one in ids]
    assert {one["state"] for one in results} == {"completed"}, results
    assert max(one["attempt"] for one in results) == 2
    assert [one["result"] for one in results] == expected


async def send_images(service: Service) -> list[str]:
    """Their ids; the last two have no image, and share a session with the model."""
    sampling = {"temperature": 0, "max_tokens": MANY_TOKENS, "ignore_eos": True}
    bodies: list[dict[str, Any]] = [
        {
            "model": "eye",
            "messages": [{"role": "user", "content": "What?", "images": [{"url": uri}]}],
            "parameters": sampling,
        }
        for uri in (png_uri(RED), png_uri(BLUE)) * 4
    ]
    bodies += [{"model": "eye", "content": text, "parameters": sampling} for text in ("a", "b")]
    answer = await service.client.post("/results/", json=bodies)
    assert answer.status_code == 202, answer.text
    return [one["id"] for one in answer.json()]


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (b"\x89PNG\r\n\x1a\nbroken", "image"),
        (png(RED)[:50], "image"),
        (png(RED, 8000, 8000), "image has 8000 x 8000 pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a base64-encoded image"),
    ],
)
async def test_a_wrong_image_fails_its_own_request_alone(
    service: Service, eye: SmallModels, image: bytes, words: str
) -> None:
    with pytest.raises(ModelError, match=words):
        await collect(eye, direct_request(image))
    if image.startswith(b"\x89PNG"):
        body = {
            "model": "eye",
            "messages": [{"role": "user", "content": "x", "images": [{"url": data_uri(image)}]}],
        }
        answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=60"})
        result = answer.json()
        assert (result["state"], result["error"]["code"]) == ("failed", "invalid_request")
    assert await collect(eye, direct_request(png(BLUE)))
