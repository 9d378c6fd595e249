"""Equal requests with `reuse`: at once, and after the end of one."""

import asyncio
from typing import Any

from tests.chaos.storm.client import Client


async def equal_requests(client: Client) -> None:
    """Send two at once, follow them to their ends, and send a third.

    Orders of both teams have the same text.
    """
    client.headers.pop("Idempotency-Key")
    order = client.order
    ids = await asyncio.gather(_send(client, 0), _send(client, 1))
    if order.intent == "cancel":
        await asyncio.sleep(order.pause / 4)  # the moment that the order drew
        reply, state = await client.insist("POST", f"/results/{ids[0]}/cancel")
        assert reply.status in (200, 202), (reply.status, state)
    ends = [await client.follow(one) for one in ids]
    send = _complete if order.number % 2 and order.intent != "fail" else _send
    order.ids = [*ids, await send(client, 2)]
    ends.append(await client.follow(order.ids[2]))
    order.sources = {one["id"]: one["reused_from"] for one in ends if one.get("reused")}
    if "completed" in (ends[0]["state"], ends[1]["state"]):
        order.reused = [order.ids[2]]


def _key(client: Client, number: int) -> dict[str, str]:
    return {"Idempotency-Key": f"{client.order.key}.{number}"}


def _asked(client: Client, number: int) -> dict[str, Any]:
    """Members that all dialects have."""
    return {"model": client.order.model, "metadata": {"order": f"{client.order.number}.{number}"}}


async def _send(client: Client, number: int) -> str:
    parameters = {"max_tokens": client.max_tokens, "temperature": 0}
    body = {"content": client.order.prompts[number], "parameters": parameters, "reuse": True}
    body |= _asked(client, number)
    reply, result = await client.insist("POST", "/results/", body, **_key(client, number))
    assert reply.status in (200, 202), (reply.status, result)
    return str(result["id"])


async def _complete(client: Client, number: int) -> str:
    """The same by OpenAI's completions, which return the whole text."""
    body = {"prompt": client.order.prompts[number], "max_tokens": client.max_tokens}
    body |= _asked(client, number) | {"temperature": 0, "reuse": True}
    reply, answer = await client.insist("POST", "/v1/completions", body, **_key(client, number))
    assert reply.status == 200, (reply.status, answer)
    (result_id,) = reply.headers["x-result-id"].split(", ")
    final = await client.follow(result_id)
    assert reply.headers.get("x-reused-from") == final.get("reused_from"), (reply.headers, final)
    assert answer["choices"][0]["text"] == final["result"], (answer, final)
    return result_id
