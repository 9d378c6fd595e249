"""Images of messages, with the scripted model: its words depend on them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import asyncpg
import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.inference.images import to_base64
from app.worker.backends.stored_images import StoredImages
from tests.conftest import Service, make_settings, run_service
from tests.images import BLUE, RED, chat_part, data_uri, png_uri
from tests.integration.launching import Worker
from tests.integration.support import (
    assert_openai_error,
    assert_problem,
    read,
    until,
    until_running,
    write_model,
)
from tests.postgres import PostgresServer
from tests.unit.worker.test_attempt import claim_of

PARTS = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %} {% endfor %}"
)
TEXTS = "{% for message in messages %}{{ message.content }} {% endfor %}"
QUESTION = "what {{chunks=3}}"
VISION = '{"max_position_embeddings": 4096, "vision_config": {}}'


@pytest.fixture
def vision_settings(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> Settings:
    """A service whose scripted model has vision, and a template with places for images."""
    write_model(tmp_path, "scripted", template=PARTS)
    (tmp_path / "scripted" / "1" / "config.json").write_text(VISION)
    return make_settings(
        postgres_server, database_name, triton, model_repository=tmp_path, max_images=2
    )


@pytest.fixture
async def vision(vision_settings: Settings) -> AsyncIterator[Service]:
    async with run_service(vision_settings, with_worker=True) as service:
        yield service


def user(*images: str, text: str = QUESTION) -> list[dict[str, Any]]:
    """Messages of the native API."""
    return [{"role": "user", "content": text, "images": [{"url": one} for one in images]}]


def chat(*parts: str) -> dict[str, Any]:
    """The body of a chat completion; parts that are data URIs are images."""
    content = list(map(chat_part, parts))
    return {"model": "scripted", "messages": [{"role": "user", "content": content}]}


async def complete(service: Service, *parts: str) -> tuple[str, dict[str, Any]]:
    """The text of a chat completion, and its stored result."""
    answer = await service.client.post("/v1/chat/completions", json=chat(*parts))
    assert answer.status_code == 200, answer.text
    result = await read(service, answer.headers["x-result-id"])
    return answer.json()["choices"][0]["message"]["content"], result


async def finish(service: Service, messages: list[dict[str, Any]]) -> dict[str, Any]:
    body = {"model": "scripted", "messages": messages}
    answer = await service.client.post("/results/", json=body, headers={"Prefer": "wait=30"})
    result: dict[str, Any] = answer.json()
    assert result["state"] == "completed", result
    return result


async def test_a_chat_has_images_at_their_places(vision: Service) -> None:
    red, blue = png_uri(RED), png_uri(BLUE)
    texts = {
        (await complete(vision, *parts))[0]
        for parts in (
            (QUESTION,),
            (red, QUESTION),
            (blue, QUESTION),
            (red, blue, QUESTION),
            (blue, red, QUESTION),
            (QUESTION, red),
        )
    }
    assert len(texts) == 6
    in_order = await vision.services.database.fetch(
        "SELECT id FROM results WHERE parameters #>> '{images,count}' = '2' ORDER BY id"
    )
    stored, images = StoredImages(vision.services.database, 64_000_000), {"count": 2, "pixels": 32}
    with ExitStack() as until:
        loaded = [
            await stored.load(
                replace(claim_of(), id=one["id"], parameters={"images": images}), until
            )
            for one in in_order
        ]
    assert loaded == [[to_base64(red), to_base64(blue)], [to_base64(blue), to_base64(red)]]
    _, result = await complete(vision, "one", red, "two {{chunks=1}}", blue)
    images = {"count": 2, "characters": len(red) + len(blue), "pixels": 32}
    assert result["parameters"]["images"] == images
    context = (await vision.client.get(f"/contexts/{result['context_id']}")).json()
    assert context["messages"] == [
        {
            "role": "user",
            "content": "one\ntwo {{chunks=1}}",
            "images": [{"url": red, "after": 3}, {"url": blue, "after": 20}],
        }
    ]


async def test_all_ways_to_send_have_the_same_text(
    vision: Service, connection: asyncpg.Connection
) -> None:
    expected, _ = await complete(vision, png_uri(RED), QUESTION)
    messages = user(png_uri(RED))
    first = await finish(vision, messages)
    assert first["result"] == expected
    assert await connection.fetchval(
        "SELECT prompt FROM results WHERE id = $1", first["id"]
    ) == f"<image>{QUESTION} "  # fmt: skip

    retried = await vision.client.post(f"/results/{first['id']}/retry")
    assert (await read(vision, retried.json()["id"], wait=30))["result"] == expected
    saved = (await vision.client.post("/contexts/", json={"messages": messages})).json()
    assert saved["messages"] == [messages[0] | {"images": [{"url": png_uri(RED), "after": 0}]}]
    sent = await vision.client.post(f"/models/send/scripted/{saved['id']}")
    assert (await read(vision, sent.json()["id"], wait=30))["result"] == expected
    again = await finish(vision, saved["messages"])
    assert again["result"] == expected
    many = await vision.client.post(
        "/results/", json=[{"model": "scripted", "messages": messages}] * 2
    )
    for one in many.json():
        assert (await read(vision, one["id"], wait=30))["result"] == expected
    choices = await vision.client.post(
        "/v1/chat/completions", json=chat(png_uri(RED), QUESTION) | {"n": 2}
    )
    assert [one["message"]["content"] for one in choices.json()["choices"]] == [expected] * 2


@pytest.mark.trial
async def test_a_killed_worker_loses_no_image(vision_settings: Settings, tmp_path: Path) -> None:
    settings = vision_settings.model_copy(update={"lease_seconds": 5.0})
    messages = user(png_uri(BLUE), text="slow {{chunks=60 delay_ms=50}}")
    async with run_service(settings, with_worker=False) as service:
        workers = [Worker(settings, tmp_path) for _ in range(2)]
        await workers[0].start()
        body = {"model": "scripted", "messages": messages}
        sent = (await service.client.post("/results/", json=body)).json()
        await until_running(service, sent["id"])
        await workers[0].kill()
        await workers[1].start()
        try:
            result = await read(service, sent["id"], wait=60)
            assert (result["state"], result["continued"]) == ("completed", 0)
            assert result["attempt"] >= 2
            assert result["result"] == (await finish(service, messages))["result"]
        finally:
            await workers[1].kill()


async def test_images_are_erased_with_the_texts(
    vision: Service, connection: asyncpg.Connection
) -> None:
    body = chat(png_uri(RED), QUESTION) | {"store": False}
    assert (await vision.client.post("/v1/chat/completions", json=body)).status_code == 200
    await until(lambda: connection.fetchval("SELECT erased_at FROM contexts"))
    assert await connection.fetchval("SELECT messages FROM contexts") is None


async def test_another_image_of_the_same_size_has_its_own_answer(vision: Service) -> None:
    red, blue = png_uri(RED), png_uri((9, 0, 0))
    assert len(red) == len(blue)
    texts = []
    for uri in (red, blue):
        body = {"model": "scripted", "messages": user(uri), "reuse": True}
        body |= {"parameters": {"temperature": 0}}
        answer = await vision.client.post("/results/", json=body, headers={"Prefer": "wait=30"})
        assert answer.json()["state"] == "completed", answer.text
        texts.append(answer.json()["result"])
    assert texts[0] != texts[1]


async def test_another_image_is_another_request(vision: Service) -> None:
    key = {"Idempotency-Key": "k"}
    sent = [
        await vision.client.post("/v1/chat/completions", json=chat(uri, QUESTION), headers=key)
        for uri in (png_uri(RED), png_uri(RED), png_uri(BLUE))
    ]
    assert [one.status_code for one in sent] == [200, 200, 409]
    assert sent[0].headers["x-result-id"] == sent[1].headers["x-result-id"]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://169.254.169.254/a.png", "URLs are not fetched"),
        ("HTTPS://example.org/a.png", "URLs are not fetched"),
        ("file:///etc/passwd", "must be `data:TYPE;base64,...`"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "must be `data:TYPE;base64,...`"),
        ("data:image/png;base64,!", "is not base64"),
        (data_uri(b"GIF89a", "image/png"), "the content is not of type image/png"),
        (data_uri(b""), "the content is not of type image/png"),
    ],
)
async def test_wrong_urls_are_refused(vision: Service, url: str, words: str) -> None:
    body = {"model": "scripted", "messages": user(url)}
    problem = assert_problem(
        await vision.client.post("/results/", json=body), 422, "invalid_request", "messages"
    )
    assert words in problem["detail"] + str(problem["errors"])
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"model": "scripted", "messages": [{"role": "user", "content": [part]}]}
    error = assert_openai_error(await vision.client.post("/v1/chat/completions", json=body), 400)
    assert words in error["message"]


async def test_a_request_has_a_bound(vision: Service, connection: asyncpg.Connection) -> None:
    body = chat(*[png_uri(RED)] * 3, QUESTION)
    answer = await vision.client.post("/v1/chat/completions", json=body)
    error = assert_openai_error(answer, 400, param="messages")
    assert "have 3 images; a request may have 2 (LLM_MAX_IMAGES)" in error["message"]
    outside = [{"url": png_uri(RED), "after": 2}]
    body = {"model": "scripted", "messages": [{"role": "user", "content": "x", "images": outside}]}
    assert_problem(await vision.client.post("/results/", json=body), 422, "invalid_request")
    assert await connection.fetchval("SELECT count(*) FROM results") == 0


async def test_images_wait_until_their_team_has_room(vision: Service) -> None:
    """A team has twice the pixels of one request between a worker and its engines."""
    _, result = await complete(vision, png_uri(RED), QUESTION)
    stored = StoredImages(vision.services.database, 100)
    images = {"count": 1, "pixels": 90}
    claim = replace(claim_of(), id=UUID(result["id"]), team_id="a", parameters={"images": images})
    with ExitStack() as first, ExitStack() as others:
        assert await stored.load(claim, first) == [to_base64(png_uri(RED))]
        await stored.load(claim, others)
        third = asyncio.create_task(stored.load(claim, others))
        assert await stored.load(replace(claim, team_id="b"), others)
        assert not third.done()
        first.close()
        assert await third


@pytest.mark.parametrize("lacking", ["vision", "template"])
async def test_a_model_without_vision_refuses_them(
    vision_settings: Settings, tmp_path: Path, lacking: str
) -> None:
    version = tmp_path / "scripted" / "1"
    if lacking == "vision":
        (version / "config.json").write_text('{"max_position_embeddings": 4096}')
    else:
        (version / "chat_template.jinja").write_text(TEXTS)
    async with run_service(vision_settings, with_worker=True) as service:
        body = {"model": "scripted", "messages": user(png_uri(RED))}
        native = await service.client.post("/results/", json=body)
        problem = assert_problem(native, 422, "invalid_request", "messages")
        assert "model scripted takes no images" in problem["detail"]
        answer = await service.client.post("/v1/chat/completions", json=chat(png_uri(RED), "x"))
        error = assert_openai_error(answer, 400, param="messages")
        assert "takes no images" in error["message"]
        assert (await finish(service, user()))["result"]
