"""Attacks by images: huge, broken, many, and of types that are none, by each dialect that takes them."""

import base64
from typing import Any

from tests.images import block, chat_part, input_part, png
from tests.security.hostile.attacker import MODEL, Attacker
from tests.security.hostile.request_attacks import dumps, odd

_BODY = 1_900_000  # just below LLM_MAX_BODY_BYTES
_MAX_TURNS = 12  # more than LLM_MAX_IMAGES


def given(attacker: Attacker) -> list[str]:
    """The images of a request as data URIs, or as what is none."""
    small = base64.b64encode(png((1, 2, 3))).decode()
    huge = base64.b64encode(png((1, 2, 3)) + bytes(attacker.size(_BODY) * 7 // 10)).decode()
    data = attacker.chance.choice(
        [[small], [small] * attacker.size(5000), [huge], [small[:-9]], [odd(attacker)], ["="], [""]]
    )
    kinds = ("image/png", "image/png", "image/gif", "image/svg+xml", "text/html", odd(attacker))
    kind = attacker.chance.choice(kinds)
    return [f"data:{kind};base64,{one}" for one in data]


async def images(attacker: Attacker) -> None:
    uris, text = given(attacker), odd(attacker) or "i"
    parts = [part for uri in uris for part in (uri, text)] if len(uris) > 1 else [*uris, text]
    await _by_messages(attacker, list(map(block, parts)))
    chat = {"model": MODEL, "max_tokens": 2}
    chat["messages"] = [{"role": "user", "content": list(map(chat_part, parts))}]
    await attacker.post("/v1/chat/completions", dumps(chat))
    await _by_responses(attacker, list(map(input_part, parts)))


async def _by_messages(attacker: Attacker, blocks: list[dict[str, Any]]) -> None:
    for one in blocks:
        if one["type"] == "image" and attacker.chance.random() < 0.1:
            kind = attacker.chance.choice(["url", "file", odd(attacker)])
            one["source"] = {"type": kind, "url": "http://169.254.169.254/", "file_id": "f"}
    if attacker.chance.random() < 0.5:
        blocks = [{"type": "tool_result", "tool_use_id": "a", "content": blocks}]
    body = {"model": MODEL, "max_tokens": 2, "messages": [{"role": "user", "content": blocks}]}
    await attacker.post("/v1/messages", dumps(body))
    await attacker.post("/v1/messages/count_tokens", dumps(body))
    requests = [{"custom_id": str(number), "params": body} for number in range(attacker.size(3))]
    await attacker.post("/v1/messages/batches", dumps({"requests": requests}))


async def _by_responses(attacker: Attacker, parts: list[dict[str, Any]]) -> None:
    """A conversation that grows until it has more images than a request may have."""
    for one in parts:
        if one["type"] == "input_image" and attacker.chance.random() < 0.1:
            name = attacker.chance.choice(["image_url", "file_id"])
            one |= {name: attacker.chance.choice(["http://169.254.169.254/", 7, {}, odd(attacker)])}
    body: dict[str, Any] = {"model": MODEL, "max_output_tokens": 2}
    body["input"] = [{"role": "user", "content": parts}]
    for _ in range(_MAX_TURNS):
        answer = await attacker.post("/v1/responses", dumps(body))
        if not answer:
            return
        await attacker.get(f"/v1/responses/{answer['id']}/input_items?limit=100")
        body["previous_response_id"] = answer["id"]
