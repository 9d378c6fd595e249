"""Bodies whose bytes matter (numbers, marks), kept as data: the .toml files of `inputs/`."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Service

pytestmark = pytest.mark.asyncio(loop_scope="module")

INPUTS = {
    f"{file.stem}: {one['name']}": one
    for file in sorted((Path(__file__).parent / "inputs").glob("*.toml"))
    for one in tomllib.loads(file.read_text())["inputs"]
}


def member_of(value: Any, path: str) -> Any:
    for name in path.split("."):
        value = value[int(name)] if isinstance(value, list) else value[name]
    return value


@pytest.mark.parametrize("name", INPUTS)
async def test_an_input_is_answered(chat_service: Service, name: str) -> None:
    one = INPUTS[name]
    answer = await chat_service.client.request(
        one.get("method", "POST"),
        one["path"],
        content=one.get("body", "").encode(),
        headers={"content-type": "application/json"} | one.get("headers", {}),
    )
    assert answer.status_code == one["status"], answer.text
    for path, expected in one.get("members", {}).items():
        assert member_of(answer.json(), path) == expected, answer.text
