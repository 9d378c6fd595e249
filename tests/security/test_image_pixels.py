"""Images of a few kilobytes that take a hundred megabytes each where they are decoded."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from app.core.weighted_places import WeightedPlaces
from app.inference.image_size import UNKNOWN_PIXELS, count_pixels
from tests.conftest import Service, make_settings, run_service
from tests.images import RED, block, chat_part, data_uri, input_part, png, png_uri
from tests.integration.inference.test_images import PARTS, VISION
from tests.integration.support import assert_refusal, write_model
from tests.postgres import PostgresServer
from tests.unit.vllm_backend.modules import load

EDGE = 5_650  # pixels: just below what the vLLM backend takes
Hold = Callable[[int], AbstractAsyncContextManager[None]]


def bomb(edge: int = EDGE) -> str:
    """A PNG of so many rows and columns, up to its size."""
    size = edge.to_bytes(4, "big") * 2
    return data_uri(png(RED)[:16] + size + png(RED)[24:])


@pytest.fixture
async def vision(
    postgres_server: PostgresServer, database_name: str, triton: EmbeddedTriton, tmp_path: Path
) -> AsyncIterator[Service]:
    """An API without a worker, whose model has vision."""
    write_model(tmp_path, "scripted", template=PARTS)
    (tmp_path / "scripted" / "1" / "config.json").write_text(VISION)
    settings: Settings = make_settings(
        postgres_server, database_name, triton, model_repository=tmp_path
    )
    async with run_service(settings, with_worker=False) as running:
        yield running


def by_message(uris: list[str]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "x", "images": [{"url": uri} for uri in uris]}]


REQUESTS: dict[str, Callable[[list[str]], Any]] = {
    "/results/": lambda uris: {"messages": by_message(uris)},
    "/v1/chat/completions": lambda uris: {
        "messages": [{"role": "user", "content": list(map(chat_part, uris))}]
    },
    "/v1/responses": lambda uris: {
        "input": [{"role": "user", "content": list(map(input_part, uris))}]
    },
    "/v1/messages": lambda uris: {
        "max_tokens": 2,
        "messages": [{"role": "user", "content": list(map(block, uris))}],
    },
}


async def test_the_pixels_of_a_request_are_bounded(vision: Service) -> None:
    for path, make in REQUESTS.items():
        for uris in ([bomb()] * 8, [bomb()] * 3, [bomb(60_000)]):
            answer = await vision.client.post(path, json={"model": "scripted", **make(uris)})
            assert_refusal(path, answer, 422 if path == "/results/" else 400)
            assert "LLM_MAX_IMAGE_PIXELS" in answer.text
    body = {"model": "scripted", "messages": by_message([bomb()] * 2)}
    answer = await vision.client.post("/results/", json=body)
    assert answer.status_code == 202, answer.text
    assert answer.json()["parameters"]["images"]["pixels"] == 2 * EDGE**2


def test_an_image_that_hides_its_size_counts_as_a_large_one() -> None:
    for content, kind in (
        (b"\x89PNG\r\n\x1a\nbroken", "png"),
        (b"\xff\xd8" + b"\xff\xfe\x00\x03x" * 50_000, "jpeg"),
        (b"GIF89a" + b"\x01\x00" * 2 + bytes(3) + b"!\xfe\x01x" * 5_000, "gif"),
        (b"RIFF", "webp"),
    ):
        assert count_pixels([data_uri(content, f"image/{kind}")]) == UNKNOWN_PIXELS
    frame = b"," + bytes(4) + EDGE.to_bytes(2, "little") * 2 + b"\x00"
    small_screen = b"GIF89a" + b"\x01\x00" * 2 + bytes(3) + frame
    assert count_pixels([data_uri(small_screen, "image/gif")]) == EDGE**2
    assert count_pixels([png_uri(RED), bomb()]) == 16 + EDGE**2
    assert base64.b64decode(bomb().partition(",")[2]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "new_hold",
    [lambda most: WeightedPlaces(most).hold, lambda most: load("pixel_gate").PixelGate(most).hold],
    ids=["of a team in a worker", "in the vLLM backend"],
)
async def test_images_are_decoded_as_far_as_there_is_room(new_hold: Callable[[int], Hold]) -> None:
    hold = new_hold(64)
    held, most = 0, 0
    order: list[int] = []

    async def decode(number: int, pixels: int) -> None:
        nonlocal held, most
        async with hold(pixels):
            order.append(number)
            held += min(pixels, 64)
            most = max(most, held)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            held -= min(pixels, 64)

    sizes = [32, 32, 1, 64, 1, 200, 5, 64]
    async with asyncio.timeout(20):
        tasks = [asyncio.create_task(decode(*one)) for one in enumerate(sizes)]
        await asyncio.sleep(0)
        tasks[2].cancel()  # the first that waits
        await asyncio.wait(tasks)
        await decode(8, 64)
    assert order == [0, 1, 3, 4, 5, 6, 7, 8]
    assert most == 64
    assert held == 0
