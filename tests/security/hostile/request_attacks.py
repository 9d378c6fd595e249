"""Attacks by requests: the largest, the deepest, the oddest that each route reads."""

import asyncio
from typing import Any
from urllib.parse import quote

import orjson

from tests.security.hostile.attacker import MODEL, Attacker

_BODY = 1_900_000  # just below LLM_MAX_BODY_BYTES
_LINES = 50_000  # LLM_MAX_BATCH_LINES

ODD = (
    "\x00", "\ud800", "\u202e" * 50, "a" + "\u0301" * 20_000, "👨‍👩‍👧‍👦" * 500, "\ufffe\uffff", "ﷺ" * 2000,
    "İ" * 1000, "\r\n\r\nGET / HTTP/1.1", "'; DROP TABLE results; --", "%00%ff", "../" * 30,
    "{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}x{% endfor %}", "$(id)", "=cmd|' /C calc'!A0",
    "\U0001d573" * 1000, "\x1b[2J", "<script>alert(1)</script>", "\u2028\u2029", "",
)  # fmt: skip


def odd(attacker: Attacker) -> str:
    return attacker.chance.choice(ODD)


def short(attacker: Attacker) -> dict[str, Any]:
    words = {"model": MODEL, "content": f"hostile {attacker.chance.random()} {{{{chunks=3}}}}"}
    return words | {"parameters": {"max_tokens": 4}}


def dumps(value: object) -> bytes:
    """JSON of any text, lone surrogates too."""
    import json

    return json.dumps(value).encode()


async def list_of_results(attacker: Attacker) -> None:
    accepted = await attacker.post(
        "/results/", [short(attacker) for _ in range(attacker.size(1000))]
    )
    if accepted:
        await attacker.post("/results/cancel?model_name=scripted", None)


async def largest_prompt(attacker: Attacker) -> None:
    body = short(attacker) | {"content": "x" * attacker.size(_BODY)}
    await attacker.post(
        "/results/", body, Prefer=f"wait={attacker.chance.choice(['1', '1e9', '-1', 'x'])}"
    )


async def largest_context(attacker: Attacker) -> None:
    text = (odd(attacker) or "y") * 40
    made = await attacker.post(
        "/contexts/", dumps({"content": text, "metadata": {text[:90]: text}})
    )
    if made:
        await asyncio.gather(
            *(attacker.post(f"/models/send/{MODEL}/{made['id']}", None) for _ in range(20))
        )
        await attacker.send("DELETE", f"/contexts/{made['id']}?force=true")


async def deep_and_odd_json(attacker: Attacker) -> None:
    depth = attacker.size(100_000)
    bodies = (
        b"[" * depth,
        b'{"a":' * depth + b"1" + b"}" * depth,
        b'{"model":"scripted","content":"x","metadata":' + b'{"a":' * 200 + b"1" + b"}" * 201,
        b'{"content":"' + b"\\ud800" * 1000 + b'"}',
        b'{"n":' + b"9" * depth + b"}",
        b'{"x":1e' + b"9" * 400 + b"}",
        b"\xff\xfe\x00" * 1000,
        b'{"model":"scripted",' * 1000,
        dumps({str(n): n for n in range(attacker.size(50_000))}),
    )
    paths = ("/results/", "/contexts/", "/v1/chat/completions", "/v1/responses", "/generate", "/tokenize",
             "/v1/batches", "/inference/scripted", "/v1/completions", "/chat_tokenize", "/v1/messages",
             "/v1/messages/count_tokens")  # fmt: skip
    for body in attacker.chance.sample(bodies, 3):
        await attacker.post(attacker.chance.choice(paths), body)


async def odd_parameters(attacker: Attacker) -> None:
    values: tuple[Any, ...] = (
        float("1e308"), -1, 2**63, 2**70, 0, "1", "", None, [], {}, True, [odd(attacker)] * 10,
        ["x" * 200] * 16, {"a" * 100: 1}, odd(attacker),
    )  # fmt: skip
    names = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "n", "logprobs", "logit_bias",
             "structured_outputs", "bad_words", "stop_token_ids", "allowed_token_ids", "min_p", "unknown")  # fmt: skip
    for _ in range(10):
        chosen = {attacker.chance.choice(names): attacker.chance.choice(values) for _ in range(3)}
        await attacker.post("/results/", dumps(short(attacker) | {"parameters": chosen}))
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "x {{chunks=1}}"}]}
        await attacker.post("/v1/chat/completions", dumps(chat | chosen))


async def grammars(attacker: Attacker) -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(attacker.size(200)):
        schema = {"type": "object", "properties": {"a": schema, "b": {"$ref": "#"}}}
    wanted = (
        {"json": schema}, {"regex": "(a+)+" * 50 + "$"}, {"regex": "(" * 500}, {"regex": "a{1,100000}" * 20},
        {"choice": [odd(attacker) + str(n) for n in range(2000)]}, {"grammar": "root ::= root root\n" * 500},
    )  # fmt: skip
    for one in attacker.chance.sample(wanted, 2):
        body = short(attacker)
        body["parameters"]["structured_outputs"] = one
        await attacker.post("/results/", dumps(body))


async def many_choices(attacker: Attacker) -> None:
    message = {"role": "user", "content": "z" * attacker.size(100_000)}
    body = {"model": MODEL, "messages": [message], "n": attacker.size(128), "max_tokens": 16}
    body |= {"logprobs": True, "top_logprobs": 20, "stream": attacker.chance.random() < 0.5}
    await attacker.post("/v1/chat/completions", body)


async def many_prompts(attacker: Attacker) -> None:
    prompts = [odd(attacker) or "p" for _ in range(attacker.size(128))]
    body = {"model": MODEL, "prompt": prompts, "max_tokens": 2, "n": attacker.chance.choice([1, 4])}
    await attacker.post("/v1/completions", dumps(body))


async def templates(attacker: Attacker) -> None:
    messages = [
        {"role": attacker.chance.choice(["user", "assistant", "system", "tool", odd(attacker)]),
         "content": attacker.chance.choice(["", "{{ x }}", odd(attacker), [{"type": "text", "text": "a"}]])}
        for _ in range(attacker.size(5000))
    ]  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 1}
    if attacker.chance.random() < 0.5:
        body["tools"] = [tool] * attacker.size(500)
    await attacker.post("/v1/chat/completions", dumps(body))
    await attacker.post("/chat_tokenize", dumps({"inputs": "", **body}))


async def tokenizers(attacker: Attacker) -> None:
    text = attacker.chance.choice(["a", " ", "é", "🙂", "a b "]) * attacker.size(200_000)
    await attacker.post("/tokenize", {"inputs": text, "model": MODEL})


async def stored_responses(attacker: Attacker) -> None:
    previous = None
    for _ in range(attacker.size(10)):
        body = {"model": MODEL, "input": "r" * attacker.size(50_000), "max_output_tokens": 2}
        body |= {"previous_response_id": previous} if previous else {"background": True}
        answer = await attacker.post("/v1/responses", body)
        if not answer:
            return
        previous = answer["id"]
        await attacker.get(f"/v1/responses/{previous}/input_items?limit=100")
        await attacker.post(f"/v1/responses/{previous}/cancel", None)


async def other_dialects(attacker: Attacker) -> None:
    text = odd(attacker) or "t"
    parameters = {"max_new_tokens": 4, "stop": [text[:50]] * 4, "best_of": 1, "top_n_tokens": 5}
    for path in ("/generate", "/generate_stream", "/"):
        body = {"inputs": text, "parameters": parameters, "model": MODEL}
        await attacker.post(path, dumps(body))
    await attacker.post("/inference/scripted", dumps({"text": text, "max_tokens": "99999999999"}))
    await attacker.post("/inference", dumps({"text": text, "temperature": "nan"}))


async def messages(attacker: Attacker) -> None:
    text = odd(attacker) or "m"
    kinds = ("text", "tool_use", "tool_result", "thinking", "image", odd(attacker))
    blocks = [
        {"type": attacker.chance.choice(kinds), "text": text, "id": "a", "name": "f", "input": {text[:9]: 1},
         "tool_use_id": text[:200], "content": text}
        for _ in range(attacker.size(500))
    ]  # fmt: skip
    body: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 4,
        "system": text,
        "stream": attacker.chance.random() < 0.5,
    }
    body["messages"] = [{"role": "user", "content": attacker.chance.choice([text, blocks, []])}]
    body["stop_sequences"] = ["a" * length + "b" for length in range(240, 256)]
    if attacker.chance.random() < 0.3:
        schema = {"type": "object", "properties": {text[:20]: {"$ref": "#"}}}
        body["tools"] = [{"name": "f", "input_schema": schema}] * attacker.size(600)
    await attacker.post("/v1/messages", dumps(body), **{"anthropic-beta": "x" * 5000})
    await attacker.post("/v1/messages/count_tokens", dumps(body))


async def files_and_batches(attacker: Attacker) -> None:
    line = {"method": "POST", "url": "/v1/completions"}
    bodies = [
        {"model": MODEL, "prompt": "b {{chunks=1}}", "max_tokens": 1},
        {"model": odd(attacker)},
        7,
    ]
    lines = (
        dumps(line | {"custom_id": str(n), "body": attacker.chance.choice(bodies)})
        for n in range(attacker.size(_LINES))
    )
    junk = attacker.chance.choice([b"", b"\xff\xfe", b"[" * 5000, b"\x00" * 5000])
    parts = {"purpose": b"batch", "file": b"\n".join(lines) + b"\n" + junk}
    head = {"Content-Type": "multipart/form-data; boundary=xx"}
    content = b"".join(
        f'--xx\r\nContent-Disposition: form-data; name="{name}"; filename="{name}"\r\n\r\n'.encode()
        + part + b"\r\n"
        if name == "file"
        else f'--xx\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'.encode() + part + b"\r\n"
        for name, part in parts.items()
    )  # fmt: skip
    file = await attacker.send("POST", "/v1/files", content + b"--xx--\r\n", head)
    if not file:
        return
    wanted = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    batches = [await attacker.post("/v1/batches", wanted) for _ in range(5)]
    await asyncio.gather(
        *(attacker.post(f"/v1/batches/{one['id']}/cancel", None) for one in batches if one)
    )
    await attacker.send("DELETE", f"/v1/files/{file['id']}")


async def broken_forms(attacker: Attacker) -> None:
    boundary = attacker.chance.choice(["x", "x" * 200, '"', "x; x", ""])
    head = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
    contents = (
        b"--x\r\n" * 20_000, b"--x\r\nContent-Disposition: " + b"a" * 100_000, b"\r\n" * 50_000,
        b"--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"" + b"\xff" * 500 + b"\"\r\n\r\n",
        b"--x\r\n" + b"A: b\r\n" * 10_000 + b"\r\n\r\n--x--",
    )  # fmt: skip
    await attacker.send("POST", "/v1/files", attacker.chance.choice(contents), head)


async def lists_and_search(attacker: Attacker) -> None:
    text = quote(odd(attacker).encode("utf-8", "replace")[:2000])
    words = quote(" or ".join(f'"w{n}" -x{n}' for n in range(attacker.size(300))))
    paths = (
        "/results/?limit=1000&full=true&prompts=true", f"/results/?q={words}", f"/results/?q={text}",
        f"/results/?after={text}", "/contexts/?limit=1000", f"/results/?context_id={text}", "/v1/files?limit=10000",
        f"/v1/batches?after={text}", "/results/?created_after=9999-12-31T23:59:59Z", "/history?minutes=999999999",
        f"/v1/models/{text}", f"/models/{text}", "/webhooks/deliveries?limit=1000", "/system", "/models/", "/me",
        f"/results/?limit={'9' * 5000}", f"/results/{text}", "/servers", "/launches", "/indexes?details=true",
    )  # fmt: skip
    for path in attacker.chance.sample(paths, 6):
        await attacker.get(path)


async def keys_and_headers(attacker: Attacker) -> None:
    key = attacker.chance.choice(["k", "k" * 255, "k" * 10_000, "\x7f", "é"])
    bodies = [short(attacker) for _ in range(10)]
    await asyncio.gather(
        *(attacker.post("/results/", body, **{"Idempotency-Key": key}) for body in bodies)
    )
    for name in ("Last-Event-ID", "If-None-Match", "Prefer", "X-On-Disconnect", "X-Request-Id",
                 "X-Forwarded-For", "Forwarded", "Range", "traceparent", "Accept"):  # fmt: skip
        value = attacker.chance.choice(
            ["1:" + "9" * 3000, "\xff", "*, " * 1000, "-1:0", "a=b;" * 500]
        )
        await attacker.get("/results/?limit=1", **{name: value})


async def webhooks(attacker: Attacker) -> None:
    urls = (attacker.target.webhook_url, "http://[::1%25lo]/", "http://169.254.169.254/", "file:///etc/passwd",
            "http://" + "a." * 200 + "example/", "http://user:" + "p@127.0.0.1:1/", "gopher://x")  # fmt: skip
    for url in urls:
        await attacker.post("/results/", short(attacker) | {"webhook_url": url})
    await attacker.post("/webhooks/secret", None)


async def foreign_rows(attacker: Attacker) -> None:
    """Each path that has an id, with an id of the other team: 404, and in lists none of them."""
    ids = attacker.chance.sample(
        attacker.target.foreign_ids, min(5, len(attacker.target.foreign_ids))
    )
    for one in ids:
        for method, path in (
            ("GET", f"/results/{one}?wait=5&partial=true"), ("GET", f"/results/{one}/attempts"),
            ("GET", f"/results/{one}/stream"), ("GET", f"/v1/responses/{one}"),
            ("GET", f"/v1/responses/resp_{one}"), ("GET", f"/contexts/{one}"), ("DELETE", f"/results/{one}?force=true"),
            ("POST", f"/results/{one}/cancel"), ("POST", f"/results/{one}/retry"),
            ("POST", f"/results/{one}/stream-ticket"), ("GET", f"/results/{one}/attribution"),
            ("POST", f"/models/send/{MODEL}/{one}"), ("GET", f"/v1/files/file-{one}/content"),
            ("POST", f"/v1/batches/batch_{one}/cancel"),
        ):  # fmt: skip
            answer = await attacker.send(method, path)
            if answer is not None:
                attacker.fault(
                    f"{method} {path}: the other team's row: {orjson.dumps(answer)[:300]!r}"
                )


async def wrong_tokens(attacker: Attacker) -> None:
    for token in ("llm_" + "0" * 60, "x" * 5000, "eyJhbGciOiJub25lIn0" + ".e30.", odd(attacker)):
        value = f"Bearer {token}".encode("utf-8", "replace").decode("latin-1")
        await attacker.get("/results/", Authorization=value.replace("\r", "").replace("\n", ""))


REQUESTS = (
    list_of_results, largest_prompt, largest_context, deep_and_odd_json, odd_parameters, grammars, many_choices,
    many_prompts, templates, tokenizers, stored_responses, other_dialects, messages, files_and_batches, broken_forms,
    lists_and_search, keys_and_headers, webhooks, foreign_rows, wrong_tokens,
)  # fmt: skip
