"""Inputs of real clients in each dialect: the tables of `inputs/`, one file per dialect.

A row has a `body`, whose members replace those of the dialect's smallest request, the expected `status`,
`members` of the response by their paths, `headers`, texts that the model's `prompt` contains, and the wrong
`param` of a refusal. `$times`, `$repeat`, `$nest` and `$join` stand for long values.
"""

import asyncio
import json
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import orjson
import pytest

from tests.conftest import Service

INPUTS = Path(__file__).parent / "inputs"
HELLO = [{"role": "user", "content": "hi"}]
# Path, and the smallest request.
DIALECTS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"model": "scripted", "messages": HELLO, "max_tokens": 2}),
    "responses": ("/v1/responses", {"model": "scripted", "input": "hi", "max_output_tokens": 2}),
    "messages": ("/v1/messages", {"model": "scripted", "messages": HELLO, "max_tokens": 2}),
    "chat_tokenize": ("/chat_tokenize", {"model": "scripted", "messages": HELLO}),
    "completions": ("/v1/completions", {"model": "scripted", "prompt": "hi", "max_tokens": 2}),
}
_MISSING = "(missing)"
_AT_ONCE = 16
_PAGE = 50  # rows of one test


def expand(value: Any) -> Any:
    """A value of a table, with its long parts."""
    if isinstance(value, list):
        return [expand(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "$times" in value:
        count, text = value["$times"]
        return text * count
    if "$repeat" in value:
        count, one = value["$repeat"]
        return [expand(one)] * count
    if "$nest" in value:
        nested: list[Any] = []
        for _ in range(value["$nest"] - 1):
            nested = [nested]
        return nested
    if "$join" in value:
        first, *others = map(expand, value["$join"])
        for one in others:
            first = first + one
        return first
    return {name: expand(member) for name, member in value.items()}


def at(value: Any, path: str) -> Any:
    for part in filter(None, path.split(".")):
        try:
            value = value[int(part)] if isinstance(value, list) else value[part]
        except (KeyError, IndexError, TypeError):
            return _MISSING
    return value


def rows_of(dialect: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = orjson.loads((INPUTS / f"{dialect}.json").read_bytes())
    return rows


async def prompt_of(service: Service, answer: httpx.Response) -> str:
    result_id = UUID(answer.headers["x-result-id"])
    return (await service.services.results.request("default", result_id)).prompt or ""


async def faults(service: Service, row: dict[str, Any], answer: httpx.Response) -> list[object]:
    """Everything in which an answer differs from its row."""
    if answer.status_code != row["status"]:
        return [answer.status_code, answer.text[:200]]
    found: list[object] = []
    body = answer.json()
    if "param" in row and body["error"]["param"] != row["param"]:
        found.append(body["error"])
    for path, expected in row.get("members", {}).items():
        if (given := at(body, path)) != expected:
            found.append((path, given))
    for name, expected in row.get("headers", {}).items():
        if (header := answer.headers.get(name)) != expected:
            found.append((name, header))
    if "prompt" in row:
        prompt = await prompt_of(service, answer)
        found += [(text, prompt[:300]) for text in row["prompt"] if text not in prompt]
    return found


PAGES = [(name, at) for name in DIALECTS for at in range(0, len(rows_of(name)), _PAGE)]


@pytest.mark.parametrize(("dialect", "start"), PAGES)
async def test_inputs_of_real_clients(calling: Service, dialect: str, start: int) -> None:
    path, smallest = DIALECTS[dialect]
    wrong: dict[str, list[object]] = {}
    places = asyncio.Semaphore(_AT_ONCE)

    async def check(row: dict[str, Any]) -> None:
        async with places:
            answer = await calling.client.post(path, json=smallest | expand(row["body"]))
        if found := await faults(calling, row, answer):
            wrong[row["name"]] = found

    await asyncio.gather(*map(check, rows_of(dialect)[start : start + _PAGE]))
    assert not wrong, json.dumps(wrong, indent=1, default=str)
