"""Orders by the dialects of text-generation-inference and Tenstorrent."""

import json
from typing import Any

from tests.chaos.storm.client import Client
from tests.chaos.storm.dialects.responses import read_events, refused, take_texts
from tests.chaos.storm.raw_http import ask


def _tgi(client: Client) -> dict[str, Any]:
    parameters = {"max_new_tokens": client.max_tokens}
    return {
        "inputs": client.order.prompts[0],
        "parameters": parameters,
        "model": client.order.model,
    }


async def generate(client: Client) -> None:
    if answer := await client.awaited("/generate", _tgi(client)):
        take_texts(client, [answer["generated_text"]])


async def generate_stream(client: Client) -> None:
    def take(data: str) -> None:
        event = json.loads(data)
        if "error" in event:
            client.order.refusal = f"in its stream: {event}"
            return
        client.order.texts[0] += event["token"]["text"]
        if event["generated_text"] is not None:
            assert event["generated_text"] == client.order.texts[0]
            client.order.is_whole = True

    await read_events(client, "/generate_stream", _tgi(client), take)


async def tenstorrent(client: Client) -> None:
    body = {"text": client.order.prompts[0], "max_tokens": str(client.max_tokens)}
    text = b""
    try:
        async with ask(
            client.port, "POST", f"/inference/{client.order.model}", body, client.headers
        ) as reply:
            client.count(str(reply.status))
            client.learn_ids(reply)
            if reply.status != 200:
                refused(client, reply, await reply.read())
                return
            async for block in reply.blocks():
                text += block
            client.order.is_whole = True
    except OSError:
        client.count("broken connection")
        client.order.is_broken = True
    # A cut may fall into a character.
    client.order.texts = [text.decode(errors="ignore")]
