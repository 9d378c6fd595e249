"""Attacks by small requests that cost much later: slow texts, tokens, products, replays, image bombs, suspects."""

import asyncio
from functools import cache
from typing import Any
from uuid import uuid4

from tests.images import block, chat_part, data_uri, input_part, png
from tests.security.hostile.attacker import MODEL, Attacker
from tests.security.hostile.pooling_attacks import RANKER

_BODY = 1_900_000  # just below LLM_MAX_BODY_BYTES
_TEXT = 100_000  # characters of a text that are searched
# Characters from which PostgreSQL's parser of words looks ahead, to the end of the text.
_UNITS = (
    "a_",
    "~/",
    "<!--",
    "./",
    "a.b@",
    "an_innocent_long_name_",
    "http://",
    "1e-",
    "&a",
    "\\",
    "a-",
    "<a ",
)
# Ids of the model's tokenizer: the first byte of a character of four, later ones, no text, and none of its own.
_INCOMPLETE_TOKENS = (173, 254, 248, 225, 0, 9_999_999)
_TOKENS = 20_000
_EDGE = 5_000  # pixels of a bomb of 75 MB


async def slow_words(attacker: Attacker) -> None:
    """Prompts, messages and outputs on which a parser of words takes a time that is quadratic in their length."""
    unit = attacker.chance.choice(_UNITS)
    length = attacker.size(_TEXT)
    text = (unit * length)[:length]
    echoed = f"hostile {{{{text={text}}}}}"
    rows = [
        {"model": MODEL, "content": one} for one in (text, echoed, *[echoed[:20_000] + "}}"] * 20)
    ]
    await attacker.post("/results/", rows)
    await attacker.post("/contexts/", {"content": text})
    messages = [{"role": "user", "content": part} for part in (text[:50_000], echoed)]
    chat = {"model": MODEL, "messages": messages, "max_tokens": 4}
    await attacker.post("/v1/chat/completions", chat)
    await attacker.get("/results/?q=" + unit.strip("&<\\ ") * 50)


async def incomplete_tokens(attacker: Attacker) -> None:
    """Streams of tokens that complete no character, and what is stored of them again under the same key."""
    token, number = attacker.chance.choice(_INCOMPLETE_TOKENS), attacker.size(_TOKENS)
    body = {
        "model": MODEL,
        "inputs": f"hostile {{{{token={token} chunks={number}}}}}",
        "parameters": {"max_new_tokens": number, "details": True, "stop": ["\ufffd" * 40 + "x"]},
    }
    key = str(uuid4())
    for path in (
        "/generate_stream",
        "/generate_stream",
        "/generate_stream",
        "/generate",
        "/generate",
    ):
        await attacker.post(path, body, **{"Idempotency-Key": key + path})


async def products(attacker: Attacker) -> None:
    """Requests whose results hold many times their size."""
    long, documents = "q" * attacker.size(_BODY - 50_000), ["d"] * attacker.size(1000)
    ranked = {"model": RANKER, "query": long}
    await attacker.post("/rerank", ranked | {"documents": documents})
    await attacker.post("/rerank", ranked | {"texts": documents})
    await attacker.post("/score", {"model": RANKER, "text_1": long, "text_2": documents})
    await attacker.post(
        "/v1/completions", {"model": MODEL, "prompt": long, "n": 128, "max_tokens": 1}
    )
    stops = ["s" * 200 + str(place) for place in range(16)]
    many = {"model": MODEL, "prompt": ["x"] * attacker.size(128), "n": 128, "stop": stops}
    await attacker.post("/v1/completions", many | {"max_tokens": 1})
    choices = {"choice": ["c" * 4_000] * attacker.size(400)}
    await attacker.post(
        "/v1/completions",
        {"model": MODEL, "prompt": "x", "n": 128, "max_tokens": 1, "structured_outputs": choices},
    )


async def replayed_jobs(attacker: Attacker) -> None:
    """Long rows of a job, and all of them again and again."""
    job = await attacker.post("/jobs", {"key": str(uuid4())})
    if not job:
        return
    text = "hostile row " * (attacker.size(15_000) // 12)
    lists = [
        [
            {"model": MODEL, "content": f"{text}{{{{chunks=2}}}}", "job_id": job["id"], "job_key": f"k{first + n}"}
            for n in range(100)
        ]
        for first in range(0, 400, 100)
    ]  # fmt: skip
    for _ in range(3):
        await asyncio.gather(*(attacker.post("/results/", rows) for rows in lists))
        await attacker.get(f"/jobs/{job['id']}/results?after=0&limit=1000")
    await attacker.post(f"/jobs/{job['id']}/close", None)
    await attacker.post("/results/", lists[0])
    await attacker.post(f"/jobs/{job['id']}/cancel", None)


@cache
def _bomb() -> str:
    return data_uri(png((1, 2, 3), _EDGE, _EDGE))


async def image_bombs(attacker: Attacker) -> None:
    parts = [_bomb()] * 8 + ["x"]
    chat: dict[str, Any] = {"model": MODEL, "max_tokens": 2}
    chat["messages"] = [{"role": "user", "content": list(map(chat_part, parts))}]
    message = chat | {"messages": [{"role": "user", "content": list(map(block, parts))}]}
    response = {"model": MODEL, "max_output_tokens": 2}
    response |= {"input": [{"role": "user", "content": list(map(input_part, parts))}]}
    one = chat | {"messages": [{"role": "user", "content": list(map(chat_part, parts[-2:]))}]}
    await asyncio.gather(
        attacker.post("/v1/chat/completions", chat),
        attacker.post("/v1/messages", message),
        attacker.post("/v1/responses", response),
        *(attacker.post("/v1/chat/completions", one) for _ in range(10)),
    )


async def suspects(attacker: Attacker) -> None:
    """Results that lose their engine each time, beside one that runs for long."""
    lost = f"hostile {uuid4()} {{{{chunks=4 delay_ms=50 lost_at=2}}}}"
    long = f"hostile {uuid4()} {{{{chunks=2000 delay_ms=100}}}}"
    rows = [{"model": MODEL, "content": one} for one in [long, *[lost] * attacker.size(50)]]
    rows[0]["parameters"] = {"max_tokens": 2000}  # type: ignore[assignment]
    accepted = await attacker.post("/results/", rows)
    if accepted:
        await attacker.get(f"/results/{accepted[0]['id']}?wait=10")
        await attacker.post("/results/cancel?model_name=scripted", None)


async def full_queue(attacker: Attacker) -> None:
    """As many slow results as one team may have waiting, and more."""
    slow = f"hostile {uuid4()} {{{{chunks=4 delay_ms=500}}}}"
    rows = [{"model": MODEL, "content": slow}] * attacker.size(1000)
    for _ in range(30):
        await attacker.post("/results/", rows)
    await attacker.get("/results/?limit=1&wait=5")
    await attacker.post("/results/cancel?model_name=scripted", None)


COSTS = (slow_words, incomplete_tokens, products, replayed_jobs, image_bombs, suspects, full_queue)
