"""Tokens of images in the limits of a request, with the scripted model as one of LLaVA's family."""

import json
from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import BadRequestError

from app.core.settings import Settings
from tests.images import RED, png_uri
from tests.integration.inference.test_dialect_images import by_messages, by_responses
from tests.integration.inference.test_images import chat, complete, user, vision_settings
from tests.integration.support import anthropic_client, assert_problem, openai_client, serve

__all__ = ["vision_settings"]

R = png_uri(RED)
IMAGE = 576  # tokens
LLAVA = {
    "model_type": "llava",
    "max_position_embeddings": 600,
    "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
}


@pytest.fixture
def settings(vision_settings: Settings, tmp_path: Path) -> Settings:
    (tmp_path / "scripted" / "1" / "config.json").write_text(json.dumps(LLAVA))
    return vision_settings


async def test_an_image_takes_its_tokens_of_the_models_length(settings: Settings) -> None:
    async with (
        serve(settings, with_worker=True) as service,
        openai_client(service) as client,
        anthropic_client(service) as messages,
    ):
        text = "one two three"
        _, result = await complete(service, R, " " + text)
        left = 600 - IMAGE - 3
        assert result["parameters"]["max_tokens"] == left
        assert result["parameters"]["images"] | {"characters": 0} == {
            "count": 1,
            "characters": 0,
            "pixels": 16,
            "tokens": IMAGE - 1,
        }
        saved = await service.client.post(f"/models/send/scripted/{result['context_id']}")
        assert saved.json()["parameters"] == result["parameters"]
        body = by_messages(R, " " + text)["messages"]
        await assert_counted(messages, body, IMAGE + 3)
        await assert_counted(messages, [{"role": "user", "content": text}], 3)
        words = f"at most {left} are left"
        too_long = {"max_tokens": left + 1}
        with pytest.raises(BadRequestError, match=words):
            await client.chat.completions.create(**chat(R, " " + text) | too_long)
        with pytest.raises(BadRequestError, match=words):
            await client.responses.create(
                **by_responses(R, " " + text) | {"max_output_tokens": left + 1}
            )
        with pytest.raises(BadRequestError, match="the prompt has 1154 tokens"):
            await client.chat.completions.create(**chat(R, R, " " + text))


async def assert_counted(messages: AsyncAnthropic, body: object, tokens: int) -> None:
    counted = await messages.messages.count_tokens(model="scripted", messages=body)  # type: ignore[arg-type]
    assert counted.input_tokens == tokens


async def test_an_image_counts_in_a_teams_tokens(settings: Settings) -> None:
    """Once when it is sent, and again when it is retried or sent from its context."""
    cost = IMAGE + 1 + 10  # with a word of the prompt and `max_tokens`
    limited = settings.model_copy(update={"team_tokens_per_minute": 2 * cost})
    async with serve(limited, with_worker=True) as service:
        body: dict[str, Any] = {"model": "scripted", "messages": user(R, text=" a")}
        body["parameters"] = {"max_tokens": 10}
        first = await service.client.post("/results/", json=body, headers={"Prefer": "wait=30"})
        assert first.json()["state"] == "completed", first.text
        retried = await service.client.post(f"/results/{first.json()['id']}/retry")
        assert retried.status_code == 202, retried.text
        path = f"/models/send/scripted/{first.json()['context_id']}"
        for answer in (
            await service.client.post(path, json={"parameters": {"max_tokens": 10}}),
            await service.client.post(f"/results/{first.json()['id']}/retry"),
        ):
            assert_problem(answer, 429, "limit_reached")
