"""Orders by the native API."""

import asyncio
from typing import Any

from tests.chaos.storm.client import AGAIN, WAIT, Client
from tests.chaos.storm.raw_http import Reply
from tests.chaos.stream_client import StreamReader, any_of


async def native(client: Client) -> None:
    """Send under a key, and wait; some are cancelled."""
    await _accepted(client, await client.insist("POST", "/results/", client.body()))


async def preferring_to_wait(client: Client) -> None:
    headers = {"Prefer": f"wait={WAIT}"}
    await _accepted(client, await client.insist("POST", "/results/", client.body(), **headers))


async def saved_context(client: Client) -> None:
    order = client.order
    reply, context = await client.insist("POST", "/contexts/", {"content": order.prompts[0]})
    assert reply.status == 201, (reply.status, context)
    path = f"/models/send/{client.order.model}/{context['id']}"
    await _accepted(client, await client.insist("POST", path, client.options()))


async def native_list(client: Client) -> None:
    """Many in one request, each under a key of its own."""
    order = client.order
    del client.headers["Idempotency-Key"]
    items = [
        client.body(number) | {"idempotency_key": f"{order.key}.{number}"}
        for number in range(len(order.prompts))
    ]
    reply, answers = await client.insist("POST", "/results/", items)
    assert reply.status == 202, (reply.status, answers)
    order.ids = [answer["id"] for answer in answers]
    for result_id in order.ids:
        await client.follow(result_id)


async def without_a_key(client: Client) -> None:
    """A client without a key must not retry: the result may exist although no response arrived."""
    try:
        reply, result = await client.once("POST", "/results/", client.body())
    except OSError:
        client.order.is_broken = True
        return
    if reply.status == 202:
        await _accepted(client, (reply, result))
    else:
        _refused(client, reply, result)


async def streamed(client: Client) -> None:
    """Send, and read the stream to its end, over any API, from where it was when it broke."""
    reply, result = await client.insist("POST", "/results/", client.body())
    assert reply.status in (200, 202), (reply.status, result)
    client.order.ids = [result["id"]]
    reader = StreamReader(result["id"], token=client.headers["Authorization"])
    ports = any_of(client.scene.ports, client.order.number)
    await reader.read_to_the_end(ports, again=AGAIN, gives_up=lambda: client.scene.gives_up)
    reader.check_end()
    assert reader.result is not None
    client.order.finals[result["id"]] = reader.result
    client.order.texts, client.order.is_whole = [reader.text], True


async def embedding(client: Client) -> None:
    """A vector, with the ends of a text."""
    order = client.order
    body = client.body() | {"embedding": {"normalize": False} if order.number % 2 else {}}
    del body["parameters"]
    await _accepted(client, await client.insist("POST", "/results/", body))


async def scored(client: Client) -> None:
    """A text, and the log probabilities of its prompt's tokens."""
    body = client.body()
    body["parameters"] |= {"prompt_logprobs": client.order.number % 3}
    await _accepted(client, await client.insist("POST", "/results/", body))


async def _accepted(client: Client, answer: tuple[Reply, Any]) -> None:
    reply, result = answer
    assert reply.status in (200, 202), (reply.status, result)
    order = client.order
    order.ids = [result["id"]]
    if order.intent == "cancel":
        await asyncio.sleep(order.pause)  # the moment that the order drew
        reply, state = await client.insist("POST", f"/results/{result['id']}/cancel")
        assert reply.status in (200, 202), (reply.status, state)
    await client.follow(result["id"])


def _refused(client: Client, reply: Reply, content: object) -> None:
    assert reply.status in AGAIN, (reply.status, content)
    client.order.refusal = f"{reply.status} {content}"
