"""The log lines of a result: ids that lead from the request to the end, and no text."""

import logging
from collections.abc import Iterator

import orjson
import pytest

from app.core import logs
from app.core.logs import JsonFormatter
from tests.conftest import Service
from tests.integration.support import UNKNOWN_ID, finish, send, until

WORD = "xylophone"


class Lines(logging.Handler):
    """The lines that would have been written."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def of(self, action: str) -> list[dict[str, object]]:
        found = [orjson.loads(line) for line in self.lines]
        return [line for line in found if line.get("action") == action]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, ours = Lines(), logging.getLogger("app")
    before = ours.level
    logging.getLogger().addHandler(handler)
    ours.setLevel(logging.DEBUG)
    yield handler
    ours.setLevel(before)
    logging.getLogger().removeHandler(handler)


async def test_ids_lead_from_the_request_to_the_end(service: Service, lines: Lines) -> None:
    answer = await service.client.post(
        "/results/",
        json={"model": "scripted", "content": f"{WORD} {{{{chunks=2}}}}"},
        headers={"X-Request-Id": "mine-1", "Prefer": "wait=30"},
    )
    result = answer.json()
    assert (result["state"], answer.headers["x-request-id"]) == ("completed", "mine-1")
    await until(lambda: _is_there(lines, "ended", result["id"]))
    (accepted,) = [line for line in lines.of("accepted") if line["result_id"] == result["id"]]
    assert (accepted["request_id"], accepted["team_id"]) == ("mine-1", "default")
    (ended,) = [line for line in lines.of("ended") if line["result_id"] == result["id"]]
    assert (ended["attempt"], ended["team_id"], ended["outcome"]) == (1, "default", "completed")
    assert ended["worker_id"]
    assert "request_id" not in ended  # it may outlive the request, or serve several
    (answered,) = [line for line in lines.of("answered") if line["request_id"] == "mine-1"]
    assert answered["message"] == "POST /results/: 200"


async def _is_there(lines: Lines, action: str, result_id: str) -> bool:
    return any(line["result_id"] == result_id for line in lines.of(action))


async def test_texts_are_logged_only_when_a_setting_says_so(
    service: Service, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = await finish(service, f"{WORD} {{{{chunks=2}}}}")
    failed = await finish(service, f"{WORD} {{{{chunks=2 fail_at=1}}}}")
    await service.client.get("/results/", params={"q": WORD})
    for one in (quiet, failed):
        await until(lambda: _is_there(lines, "ended", one["id"]))  # noqa: B023 - awaited at once
    assert quiet["result"]
    assert not [line for line in lines.lines if WORD in line or quiet["result"] in line]
    monkeypatch.setattr(logs, "_shows_content", True)
    finished = await finish(service, f"{WORD} {{{{chunks=2}}}}")
    await until(lambda: _is_there(lines, "ended", finished["id"]))
    (ended,) = [line for line in lines.of("ended") if line["result_id"] == finished["id"]]
    assert WORD in str(ended["prompt"])
    assert ended["output"] == finished["result"]


@pytest.mark.parametrize(
    "given", ["", "a b", "x" * 129, "-x", 'x"y', "x\ty", "é", "${jndi:ldap://x}"]
)
async def test_an_id_that_is_none_is_replaced(api: Service, given: str) -> None:
    headers = {"x-request-id": given.encode()}
    answer = await api.client.get("/models/", headers=headers)  # type: ignore[arg-type] # bytes too
    made = answer.headers["x-request-id"]
    assert made != given
    assert len(made) == 32


@pytest.mark.trial
async def test_every_answer_has_an_id(
    api: Service, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def breaks() -> bytes:
        raise RuntimeError("a bug")

    monkeypatch.setattr(type(api.services.metrics_collector), "text", lambda _: breaks())
    sent = {"X-Request-Id": "q-2"}
    for path, status in (
        ("/health/live", 200),
        ("/openapi.json", 200),
        (f"/results/{UNKNOWN_ID}", 404),
        ("/v1/models/none", 404),
        ("/no/such", 404),
        ("/metrics", 500),
    ):
        answer = await api.client.get(path, headers=sent)
        assert (answer.status_code, answer.headers.get_list("x-request-id")) == (status, ["q-2"])
    foreign = await api.client.get("/models/", headers=sent | {"host": "evil.example"})
    assert (foreign.status_code, foreign.headers["x-request-id"]) == (403, "q-2")
    twice = [("x-request-id", "a"), ("x-request-id", "b")]
    assert (await api.client.get("/models/", headers=twice)).headers["x-request-id"] not in "ab"


async def test_a_lane_is_of_no_request(api: Service, lines: Lines) -> None:
    """Shared work must not be logged under the first result's id."""
    await send(api, "x")
    lane = api.services.queue._enqueues

    async def statement(*_: object) -> list[bool]:
        logging.getLogger("app.x").info("in a lane", extra={"action": "in_lane"})
        return [True]

    lane._statement = statement
    await send(api, "x")
    (line,) = lines.of("in_lane")
    assert "request_id" not in line
