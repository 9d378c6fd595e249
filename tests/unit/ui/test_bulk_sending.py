"""Rows of a file that the API refuses for the moment: sent again before their job is closed."""

from collections.abc import AsyncGenerator
from typing import Any

import httpx
import orjson
import pytest

from app.ui.api import Api, Client
from app.ui.bulk import sending
from app.ui.errors import RefusedError

SENT = {"id": "r", "state": "pending"}


class ScriptedApi(Api):
    """Outcomes of the rows of each list; further ones are accepted."""

    def __init__(self, *lists: list[dict[str, Any]]) -> None:
        super().__init__(Client("http://127.0.0.1:9"), None)
        self.lists = list(lists)
        self.paths: list[str] = []

    async def send(self, method: str, path: str, **asked: Any) -> httpx.Response:
        self.paths.append(path)
        if path != "/results/":
            return httpx.Response(200, json={})
        rows = orjson.loads(asked["content"])
        outcomes = self.lists.pop(0) if self.lists else [SENT] * len(rows)
        return httpx.Response(202, json=outcomes)


async def _two_rows(_self: sending.Sending) -> AsyncGenerator[bytes, None]:
    for key in (b"a", b"b"):
        yield b'{"job_key": "%s"}' % key


@pytest.fixture(autouse=True)
def two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending.Sending, "_items", _two_rows)
    monkeypatch.setattr(sending, "_PAUSE_SECONDS", 0.0)


def refused(status: int, code: str, **more: Any) -> dict[str, Any]:
    return {"status": status, "code": code, "detail": "d"} | more


async def test_a_row_that_is_refused_for_the_moment_is_sent_again() -> None:
    api, notes = ScriptedApi([SENT, refused(503, "templates_busy")]), list[str]()
    await sending.Sending(api, "j", "f").run(notes.append)
    assert api.paths == ["/results/", "/results/", "/jobs/j/close"]
    assert "Waiting: d" in notes


async def test_a_job_is_not_closed_behind_an_error_of_the_api() -> None:
    api = ScriptedApi([SENT, refused(500, "internal_error")])
    with pytest.raises(RefusedError, match="d"):
        await sending.Sending(api, "j", "f").run(lambda _: None)
    assert api.paths == ["/results/"]


@pytest.mark.parametrize(
    "problem",
    [refused(422, "invalid_request"), refused(429, "limit_reached", limit="max_job_rows")],
)
async def test_a_row_that_is_refused_for_good_does_not_stop_the_others(
    problem: dict[str, Any],
) -> None:
    api = ScriptedApi([problem, SENT])
    await sending.Sending(api, "j", "f").run(lambda _: None)
    assert api.paths == ["/results/", "/jobs/j/close"]
