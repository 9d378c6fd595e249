"""Attacks by embeddings, rankings and scores, by prompts that are scored, and by reuse."""

import asyncio
from typing import Any

from tests.security.hostile.attacker import MODEL, Attacker
from tests.security.hostile.request_attacks import dumps, odd, short

_BODY = 1_900_000  # just below LLM_MAX_BODY_BYTES
_TEXTS = 1000  # of a request, at most
EMBEDDER, RANKER = "pooling", "ranking"  # tests/pooling_models.py


def texts_of(attacker: Attacker) -> list[Any]:
    """Many texts, long ones, and what is none."""
    number = attacker.size(2 * _TEXTS)
    choices: list[list[Any]] = [
        ["a b c"] * number,
        ["x" * attacker.size(_BODY)],
        [odd(attacker) for _ in range(min(number, 100))],
        [[1, 2, 3]] * number,
        [list(range(attacker.size(200_000)))],
        [[]], [7], [{}], [None], [],
    ]  # fmt: skip
    return attacker.chance.choice(choices)


async def embeddings(attacker: Attacker) -> None:
    texts = texts_of(attacker)
    odd_size = attacker.chance.choice([None, 1, 8, 0, -1, 10**9, "x"])
    kind = attacker.chance.choice(["float", "base64", odd(attacker)])
    body: dict[str, Any] = {"model": EMBEDDER, "input": texts, "encoding_format": kind}
    if odd_size is not None:
        body["dimensions"] = odd_size
    await attacker.post("/v1/embeddings", dumps(body))
    await attacker.post("/embed", dumps({"model": EMBEDDER, "inputs": texts, "truncate": True}))
    rows = [
        {"model": EMBEDDER, "content": one, "embedding": {"dimensions": odd_size}} for one in texts
    ]
    await attacker.post("/results/", dumps(rows[:_TEXTS]))


async def rankings(attacker: Attacker) -> None:
    texts, query = texts_of(attacker), odd(attacker) or "q" * attacker.size(100_000)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        name = attacker.chance.choice(["documents", "texts"])
        body = {"model": RANKER, "query": query, name: texts, "top_n": attacker.size(10**6)}
        await attacker.post(path, dumps(body))
    body = {"model": RANKER, "text_1": attacker.chance.choice([texts, query]), "text_2": texts}
    await attacker.post("/score", dumps(body))


async def scored_prompts(attacker: Attacker) -> None:
    """Log probabilities of every token of a long prompt."""
    text = "a b " * attacker.size(_BODY // 4)
    most = attacker.chance.choice([0, 1, 20, 10**6, -1])
    body = {"model": MODEL, "prompt": text, "echo": True, "logprobs": most, "max_tokens": 0}
    await attacker.post("/v1/completions", dumps(body))
    parameters = {"max_tokens": 1, "prompt_logprobs": most}
    await attacker.post("/results/", short(attacker) | {"content": text, "parameters": parameters})


async def reuse(attacker: Attacker) -> None:
    """An equal request many times at once, and after its source is deleted."""
    text = f"hostile reuse {attacker.chance.randrange(5)}"
    parameters = {"max_tokens": 4, "temperature": 0}
    body = {"model": MODEL, "content": text, "parameters": parameters, "reuse": True}
    answers = await asyncio.gather(
        *(attacker.post("/results/", body, Prefer="wait=5") for _ in range(20))
    )
    for answer in answers:
        if answer and attacker.chance.random() < 0.3:
            await attacker.send("DELETE", f"/results/{answer['id']}?force=true")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    await attacker.post("/v1/chat/completions", dumps(chat | {"temperature": 0, "reuse": True}))


POOLING = (embeddings, rankings, scored_prompts, reuse)
