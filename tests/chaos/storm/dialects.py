"""Requests of an order in each dialect, and the interpretation of their responses."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import orjson

from tests.chaos.storm import jobs
from tests.chaos.storm.client import AGAIN, FIRST_REST, LONGEST_REST, WAIT, Client, GivenUpError
from tests.chaos.storm.raw_http import Reply, ask
from tests.chaos.stream_client import StreamReader, any_of

# --- native -------------------------------------------------------------------------------------


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


async def _accepted(client: Client, answer: tuple[Reply, Any]) -> None:
    reply, result = answer
    assert reply.status in (200, 202), (reply.status, result)
    order = client.order
    order.ids = [result["id"]]
    if order.intent == "cancel":
        await asyncio.sleep(order.pause)
        reply, state = await client.insist("POST", f"/results/{result['id']}/cancel")
        assert reply.status in (200, 202), (reply.status, state)
    await client.follow(result["id"])


def _refused(client: Client, reply: Reply, content: object) -> None:
    assert reply.status in AGAIN, (reply.status, content)
    client.order.refusal = f"{reply.status} {content}"


# --- OpenAI -------------------------------------------------------------------------------------


def _chat(client: Client) -> dict[str, Any]:
    messages = [{"role": "user", "content": client.order.prompts[0]}]
    return {"model": client.order.model, "messages": messages, "max_tokens": client.max_tokens}


async def chat(client: Client) -> None:
    if answer := await client.awaited("/v1/chat/completions", _chat(client)):
        _take_texts(client, [answer["choices"][0]["message"]["content"]])


async def completions(client: Client) -> None:
    body = {
        "model": client.order.model,
        "prompt": client.order.prompts[0],
        "max_tokens": client.max_tokens,
    }
    if answer := await client.awaited("/v1/completions", body | {"n": client.order.choices}):
        choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
        _take_texts(client, [choice["text"] for choice in choices])


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

    await _read_events(client, "/v1/chat/completions", body, take)


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
        _take_texts(client, ["".join(part["text"] for part in parts)])
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
    _take_texts(client, [body["choices"][0]["text"] for body in bodies])


def _bare_id(state: str) -> str:
    return state.partition("-")[2]


# --- TGI and Tenstorrent ------------------------------------------------------------------------


def _tgi(client: Client) -> dict[str, Any]:
    parameters = {"max_new_tokens": client.max_tokens}
    return {
        "inputs": client.order.prompts[0],
        "parameters": parameters,
        "model": client.order.model,
    }


async def generate(client: Client) -> None:
    if answer := await client.awaited("/generate", _tgi(client)):
        _take_texts(client, [answer["generated_text"]])


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

    await _read_events(client, "/generate_stream", _tgi(client), take)


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
                _refused_by_dialect(client, reply, await reply.read())
                return
            async for block in reply.blocks():
                text += block
            client.order.is_whole = True
    except OSError:
        client.count("broken connection")
        client.order.is_broken = True
    # A cut may fall into a character.
    client.order.texts = [text.decode(errors="ignore")]


async def _read_events(
    client: Client, path: str, body: object, take: Callable[[str], None]
) -> None:
    """Read a stream once; who has no key must not ask again."""
    client.order.texts = [""]
    rest = b""
    try:
        async with ask(client.port, "POST", path, body, client.headers) as reply:
            client.count(str(reply.status))
            client.learn_ids(reply)
            if reply.status != 200:
                _refused_by_dialect(client, reply, await reply.read())
                return
            async for block in reply.blocks():
                *frames, rest = (rest + block).split(b"\n\n")
                for line in b"\n".join(frames).decode().split("\n"):
                    if line.startswith("data:"):
                        take(line.removeprefix("data:").strip())
    except OSError:
        client.count("broken connection")
        client.order.is_broken = True


def _refused_by_dialect(client: Client, reply: Reply, content: bytes) -> None:
    """No answer was received; the failure is the result's own or transient."""
    assert reply.status in (*AGAIN, 500, 424), (reply.status, content)
    client.order.refusal = f"{reply.status} {content.decode()}"
    client.order.texts = []


def _take_texts(client: Client, texts: list[str]) -> None:
    client.order.texts, client.order.is_whole = texts, True


DIALECTS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "native": native,
    "native, Prefer: wait": preferring_to_wait,
    "native, a list": native_list,
    "native, streamed": streamed,
    "native, no key": without_a_key,
    "context, then send": saved_context,
    "OpenAI chat": chat,
    "OpenAI chat, streamed": streamed_chat,
    "OpenAI completions, n=2": completions,
    "OpenAI responses": responses,
    "OpenAI batch": batch,
    "TGI generate": generate,
    "TGI generate_stream": generate_stream,
    "Tenstorrent": tenstorrent,
    "job": jobs.job,
    "past its budget": jobs.past_its_budget,
}
