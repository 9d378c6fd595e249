"""Orders by Anthropic's Messages."""

import asyncio
import json
from typing import Any

from tests.chaos.storm.client import FIRST_REST, Client, GivenUpError
from tests.chaos.storm.dialects.responses import read_events, take_texts
from tests.images import block


def _message(client: Client) -> dict[str, Any]:
    order = client.order
    content = [block(part) for part in (*order.images, order.prompts[0])]
    messages = [{"role": "user", "content": content if order.images else order.prompts[0]}]
    return {"model": order.model, "max_tokens": client.max_tokens, "messages": messages}


async def message(client: Client) -> None:
    if answer := await client.awaited("/v1/messages", _message(client)):
        assert answer["id"].removeprefix("msg_") in client.order.ids, answer
        take_texts(client, ["".join(part["text"] for part in answer["content"])])


async def streamed_message(client: Client) -> None:
    """Under a key: the same request streams the message from its beginning, until one stream is whole."""
    order = client.order
    body = _message(client) | {"stream": True}

    def take(data: str) -> None:
        event = json.loads(data)
        if event["type"] == "error":
            order.refusal = f"in its stream: {event['error']}"
        elif event["type"] == "content_block_delta":
            order.texts[0] += event["delta"]["text"]
        elif event["type"] == "message_stop":
            order.is_whole = not order.refusal

    ids, cut = list[str](), list[str]()
    while True:
        order.refusal = ""
        await read_events(client, "/v1/messages", body, take)
        cut += order.texts
        ids = ids or order.ids
        assert order.ids == ids, f"the key has another result: {ids}, then {order.ids}"
        if order.is_whole:
            break
        if client.scene.gives_up:
            raise GivenUpError(f"the stream of {ids}: {order.refusal}")
        await asyncio.sleep(FIRST_REST)
    assert all(order.texts[0].startswith(text) for text in cut), (order.texts, cut)
