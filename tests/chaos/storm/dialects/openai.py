"""Orders by OpenAI's dialect."""

import asyncio
import json
from typing import Any

import orjson

from tests.chaos.storm.client import AGAIN, FIRST_REST, LONGEST_REST, Client, GivenUpError
from tests.chaos.storm.dialects.responses import read_events, take_texts
from tests.chaos.storm.raw_http import ask
from tests.images import chat_part


def _chat(client: Client) -> dict[str, Any]:
    order = client.order
    content = [chat_part(part) for part in (*order.images, order.prompts[0])]
    messages = [{"role": "user", "content": content if order.images else order.prompts[0]}]
    return {"model": order.model, "messages": messages, "max_tokens": client.max_tokens}


async def chat(client: Client) -> None:
    if answer := await client.awaited("/v1/chat/completions", _chat(client)):
        take_texts(client, [answer["choices"][0]["message"]["content"]])


async def completions(client: Client) -> None:
    body = {
        "model": client.order.model,
        "prompt": client.order.prompts[0],
        "max_tokens": client.max_tokens,
    }
    if answer := await client.awaited("/v1/completions", body | {"n": client.order.choices}):
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        take_texts(client, [choice["text"] for choice in choices])


async def scored_prompt(client: Client) -> None:
    """The log probabilities of a prompt's tokens, without a text."""
    order = client.order
    body = {"model": order.model, "prompt": order.prompts[0], "max_tokens": 0}
    asked = body | {"echo": True, "logprobs": 1 + order.number % 3}
    if answer := await client.awaited("/v1/completions", asked):
        (choice,) = answer["choices"]
        assert choice["text"] == order.prompts[0], choice
        own = [next(iter(one.values()))["logprob"] for one in choice["prompt_logprobs"][1:]]
        assert choice["logprobs"]["token_logprobs"][1:] == own, choice
        order.numbers = [choice["prompt_logprobs"]]


async def streamed_chat(client: Client) -> None:
    body = _chat(client) | {"stream": True}

    def take(data: str) -> None:
        if data == "[DONE]":
            client.order.is_whole = not client.order.refusal
            return
        event = json.loads(data)
        if "error" in event:
            client.order.refusal = f"in its stream: {event['error']}"
        for choice in event.get("choices", ()):
            client.order.texts[0] += choice["delta"].get("content") or ""

    await read_events(client, "/v1/chat/completions", body, take)


async def responses(client: Client) -> None:
    """In the background, under a key, and looked at until it has ended."""
    body = {"model": client.order.model, "input": client.order.prompts[0], "background": True}
    reply, response = await client.insist(
        "POST", "/v1/responses", body | {"max_output_tokens": client.max_tokens}
    )
    assert reply.status == 200, (reply.status, response)
    order = client.order
    order.ids = [response["id"].removeprefix("resp_")]
    while response["status"] in ("queued", "in_progress"):
        if client.scene.gives_up:
            raise GivenUpError(f"{response['id']} is {response['status']}")
        await asyncio.sleep(0.5)
        reply, response = await client.insist("GET", f"/v1/responses/{response['id']}")
        assert reply.status == 200, (reply.status, response)
    if response["status"] in ("completed", "incomplete"):  # incomplete: by its length
        parts = response["output"][0]["content"]
        take_texts(client, ["".join(part["text"] for part in parts)])
    else:
        order.refusal = f"{response['status']}: {response['error']}"


async def batch(client: Client) -> None:
    """A file of requests, sent off and waited for; the lines come back in its output."""
    order = client.order
    lines = b"\n".join(
        orjson.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {
                    "model": client.order.model,
                    "prompt": prompt,
                    "max_tokens": client.max_tokens,
                },
            }
        )
        for number, prompt in enumerate(order.prompts)
    )
    form = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    form += b'--b\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    reply, file = await client.insist(
        "POST", "/v1/files", form + lines + b"\r\n--b--\r\n", **headers
    )
    assert reply.status == 200, (reply.status, file)
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions"}
    reply, state = await client.insist("POST", "/v1/batches", body | {"completion_window": "24h"})
    assert reply.status == 200, (reply.status, state)
    while state["status"] in ("validating", "in_progress", "finalizing"):
        if client.scene.gives_up:
            raise GivenUpError(f"{state['id']} is {state['status']}")
        await asyncio.sleep(1)
        reply, state = await client.insist("GET", f"/v1/batches/{state['id']}")
        assert reply.status == 200, (reply.status, state)
    assert state["status"] == "completed", state
    assert not state["error_file_id"], state
    await _read_output(client, state["output_file_id"])


async def _read_output(client: Client, file_id: str) -> None:
    """Lines, not JSON, unlike all else that is insisted upon."""
    rest = FIRST_REST
    path = f"/v1/files/{file_id}/content"
    content: bytes | None = None
    while content is None:
        try:
            async with ask(client.port, "GET", path, None, client.headers) as reply:
                client.count(str(reply.status))
                body = await reply.read()
                assert reply.status in (200, *AGAIN), (reply.status, body)
                content = body if reply.status == 200 else None
        except OSError:
            client.count("broken connection")
        if client.scene.gives_up:
            raise GivenUpError(f"the output of {file_id}")
        await asyncio.sleep(rest)
        rest = min(LONGEST_REST, rest * 1.5)
    lines = sorted(map(orjson.loads, content.splitlines()), key=lambda one: int(one["custom_id"]))
    assert [int(line["custom_id"]) for line in lines] == list(range(client.order.count))
    bodies = [line["response"]["body"] for line in lines]
    client.order.ids = [_bare_id(body["id"]) for body in bodies]
    take_texts(client, [body["choices"][0]["text"] for body in bodies])


def _bare_id(state: str) -> str:
    return state.partition("-")[2]
