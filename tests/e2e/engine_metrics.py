"""Metrics of the vLLM backend, as Triton has them."""

import asyncio

import httpx

from app.cli.up.triton import EmbeddedTriton


async def settled_counts(
    triton: EmbeddedTriton, other_than: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The counters once they stay the same for several of the backend's publications."""
    last: list[tuple[int, ...]] = []
    while True:
        last = [*last[-2:], await token_counts(triton)]
        if len(last) == 3 and set(last) == {last[0]} != {other_than}:
            return last[0]
        await asyncio.sleep(0.5)


async def token_counts(triton: EmbeddedTriton) -> tuple[int, ...]:
    """Prompt tokens and generated tokens of the model, as Triton's metrics count them."""
    values = await read_metrics(triton)
    return values["vllm:prompt_tokens_total"], values["vllm:generation_tokens_total"]


async def read_metrics(triton: EmbeddedTriton) -> dict[str, int]:
    """The backend's metrics by name, each the sum of its series."""
    async with httpx.AsyncClient() as client:
        text = (await client.get(f"http://{triton.address('metrics')}/metrics")).text
    values: dict[str, int] = {}
    for line in text.splitlines():
        if line.startswith("vllm:"):
            name, value = line.split("{")[0], line.rsplit(" ", 1)[1]
            values[name] = values.get(name, 0) + int(float(value))
    return values
