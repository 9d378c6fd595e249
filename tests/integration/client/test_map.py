"""Data sets mapped by the client: each row once, across every interruption."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import asyncpg
import httpx
import pytest
from pydantic import BaseModel, SecretStr

from app.core.settings import Settings
from app.queue import admission
from llm_api_client import (
    AsyncClient,
    AuthenticationError,
    Client,
    ConfigurationError,
    Job,
    NotFoundError,
    Row,
    RowFailedError,
    WaitTimeoutError,
)
from tests.conftest import Service
from tests.integration.client.support import blocking, lines, run_killed, url_of
from tests.integration.support import serve
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

# More than a list and a page hold.
ROWS = [{"id": f"k{i}", "topic": f"topic-{i}"} for i in range(1200)]
# The scripted model repeats the text of its prompt.
PROMPT = "{{{{text={topic}}}}}"


class City(BaseModel):
    name: str
    people: int


@pytest.fixture
async def one(settings: Settings) -> AsyncIterator[Service]:
    """API and worker in one process, behind a socket."""
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.mark.trial
async def test_each_row_is_answered_once(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    out = tmp_path / "answers.jsonl"

    def work(client: Client) -> tuple[str, list[Row[None]]]:
        job = client.map(ROWS, PROMPT, model="scripted", key="id", out=out)
        rows = list(job)
        info = job.info()
        assert (info.state, info.counts.rows, info.counts.completed) == (
            "ended",
            len(ROWS),
            len(ROWS),
        )
        return job.id, rows

    job_id, rows = await blocking(one, work)
    expected = {row["id"]: row["topic"] for row in ROWS}
    assert len(rows) == len(ROWS)
    assert {row.key: row.checked().text for row in rows} == expected
    written = lines(out)
    assert len(written) == len(ROWS)
    assert {line["key"]: line["text"] for line in written} == expected
    assert lines(tmp_path / "answers.jsonl.failed.jsonl") == []

    def again(client: Client) -> None:
        """The same cell runs twice, and once without the data."""
        job = client.map(ROWS, PROMPT, model="scripted", key="id", out=out)
        assert job.id == job_id
        assert list(job) == []
        assert len(list(client.job(job_id))) == len(ROWS)

    await blocking(one, again)
    assert lines(out) == written
    count = await connection.fetchval("SELECT count(*) FROM results")
    assert count == len(ROWS)


@pytest.mark.trial
async def test_rows_of_equal_requests_are_reused(one: Service) -> None:
    rows, greedy = ROWS[:50], {"temperature": 0, "max_tokens": 8}

    def map_rows(client: Client, name: str, **options: Any) -> dict[str, Row[None]]:
        job = client.map(
            rows, PROMPT, model="scripted", key="id", parameters=greedy, name=name, **options
        )
        return {row.key: row.checked() for row in job}

    def sources(found: dict[str, Row[None]]) -> dict[str, str | None]:
        return {key: row.result.reused_from for key, row in found.items() if row.result}

    def work(client: Client) -> tuple[dict[str, Row[None]], dict[str, Row[None]]]:
        first = map_rows(client, "a", reuse=True)
        assert set(sources(first).values()) == {None}
        assert set(sources(map_rows(client, "b")).values()) == {None}
        return first, map_rows(client, "c", reuse=True)

    first, second = await blocking(one, work)
    ids = {key: row.result.id for key, row in first.items() if row.result}
    assert sources(second) == ids
    assert {key: row.text for key, row in second.items()} == {
        row["id"]: row["topic"] for row in rows
    }
    async with AsyncClient(url_of(one)) as client:
        job = await client.map(
            rows, PROMPT, model="scripted", key="id", parameters=greedy, name="d", reuse=True
        )
        assert sources({row.key: row async for row in job}) == ids


@pytest.mark.trial
async def test_rows_in_the_order_of_the_data(one: Service) -> None:
    async with AsyncClient(url_of(one)) as client:
        rows = iter(ROWS)
        job = await client.map(rows, PROMPT, model="scripted", order="input", window=300)
        mapped = [row async for row in job]
    assert [row.input for row in mapped] == ROWS
    assert [row.text for row in mapped] == [row["topic"] for row in ROWS]


async def test_wrong_rows_do_not_stop_the_job(one: Service, tmp_path: Path) -> None:
    rows = [
        {"id": "a", "topic": "x"},
        {"id": "a", "topic": "other"},  # the key of another row
        {"id": "b"},  # a missing column
        {"id": "", "topic": "no key"},
        {"id": "long", "topic": "x" * 2_000_001},  # over the limit of a prompt
        {"id": "nul", "topic": "\x00"},
        {"id": "last", "topic": "y"},
        "no columns",
    ]
    out = tmp_path / "answers.jsonl"

    def work(client: Client) -> None:
        job = client.map(rows, PROMPT, model="scripted", key="id", out=out)
        mapped = list(job)
        assert Counter(row.error.code if row.error else "" for row in mapped) == {
            "": 2, "duplicate_key": 1, "invalid_row": 3, "body_too_large": 1, "invalid_request": 1,
        }  # fmt: skip
        with pytest.raises(RowFailedError, match="missing column topic; the row has id"):
            next(row for row in mapped if row.key == "b").checked()

    await blocking(one, work)
    assert [line["key"] for line in lines(out)] == ["a", "last"]
    assert {line["key"] for line in lines(tmp_path / "answers.jsonl.failed.jsonl")} >= {"b", "long"}


@pytest.mark.parametrize("order", ["completed", "input"])
@pytest.mark.trial
async def test_duplicate_keys_in_other_lists(one: Service, order: Any) -> None:
    rows = [*ROWS[:1100], ROWS[3], {"id": "k4", "topic": "changed"}, ROWS[1150]]

    def work(client: Client) -> list[Row[None]]:
        return list(client.map(rows, PROMPT, model="scripted", key="id", order=order))

    mapped = await blocking(one, work)
    answered = Counter(row.key for row in mapped if row.error is None)
    assert set(answered.values()) == {1}
    assert len(answered) == 1101
    codes = Counter(row.error.code for row in mapped if row.error)
    # The same row again is that row; in the order of the data it is named.
    assert codes == {"duplicate_key": 1 if order == "completed" else 2}


async def test_errors_before_anything_is_sent(one: Service, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text("{}\n")

    def work(client: Client) -> None:
        wrongs: list[dict[str, Any]] = [
            {"rows": ROWS, "prompt": "{subject}"},
            {"rows": ROWS, "prompt": "{topic"},
            {"rows": ROWS, "prompt": "{topic.x}", "key": "none"},
            {"rows": tmp_path / "none.csv"},
            {"rows": 5},
            {"rows": ROWS, "prompt": PROMPT, "out": tmp_path / "x.txt"},
        ]
        for wrong in wrongs:
            with pytest.raises(ConfigurationError):
                client.map(**{"model": "scripted", **wrong})
        job = client.map(ROWS, PROMPT, model="scripted", out=tmp_path / "mine.jsonl")
        with pytest.raises(ConfigurationError, match="is of no job"):
            list(job)
        with pytest.raises(NotFoundError, match="unknown_model"):
            client.map(ROWS[:3], PROMPT, model="none").run()
        assert client.map([], PROMPT, model="scripted").run().counts.rows == 0

    await blocking(one, work)


@pytest.mark.trial
async def test_failed_rows_are_retried(one: Service, tmp_path: Path) -> None:
    rows = [{"topic": "{{chunks=3 fail_at=1}}" if i % 10 == 0 else f"t{i}"} for i in range(50)]
    out = tmp_path / "answers.jsonl"

    def work(client: Client) -> None:
        job = client.map(rows, "{topic}", model="scripted", out=out, deadline_seconds=60)
        assert job.run().counts.rows == 50
        failed = list(job.failed())
        retried = job.retry_failed()
        assert retried.retried == len(failed)
        assert len(list(job)) == len(failed)
        assert job.info().counts.failed == len(failed)  # they fail again

    await blocking(one, work)
    keys = [line["key"] for line in lines(out)]
    failed = [line["key"] for line in lines(tmp_path / "answers.jsonl.failed.jsonl")]
    assert sorted(keys + failed) == sorted(f"row-{i}" for i in range(1, 51))


async def test_answers_as_objects(one: Service) -> None:
    rows = ['{"name": "Bern", "people": 134000}', '{"name": "Nowhere"}']

    def work(client: Client) -> None:
        mapped = {
            row.key: row
            for row in client.map(rows, "{{{{text={text} }}}}", model="scripted", structured=City)
        }
        assert mapped["row-1"].checked().value == City(name="Bern", people=134_000)
        with pytest.raises(RowFailedError, match="invalid_output"):
            mapped["row-2"].checked()

    await blocking(one, work)


async def test_a_job_goes_on_without_its_client(one: Service) -> None:
    def begin(client: Client) -> str:
        job = client.map(ROWS[:20], PROMPT, model="scripted")
        for _ in job:
            break
        return job.id

    def read(client: Client) -> int:
        return len(list(client.job(job_id)))

    job_id = await blocking(one, begin)
    assert await blocking(one, read) == 20


@pytest.mark.trial
async def test_the_end_of_a_job_is_waited_for(one: Service) -> None:
    def send(client: Client) -> Job[Any]:
        job = client.map(ROWS[:5], "{{{{delay_ms=50 chunks=5}}}} {topic}", model="scripted")
        for _ in job:
            pass
        return job

    def work(client: Client) -> None:
        job = send(client)
        assert job.wait().counts.completed == 5
        opened = client.jobs.create()
        with pytest.raises(WaitTimeoutError, match=f"Job {opened.id} did not end within 0.2"):
            client.jobs.wait(opened.id, timeout=0.2)
        began = time.monotonic()
        closing = Timer(0.5, lambda: httpx.post(f"{url_of(one)}/jobs/{opened.id}/close"))
        closing.start()
        assert client.jobs.wait(opened.id, timeout=60).state == "ended"
        assert time.monotonic() - began < 30  # of a poll
        closing.join()

    await blocking(one, work)


PROGRAM = """
import sys
from llm_api_client import Client
rows = [{"id": f"k{i}", "topic": f"topic-{i}"} for i in range(int(sys.argv[1]))]
with Client() as client:
    info = client.map(
        rows, "{{{{delay_ms=1 text={topic}}}}}", model="scripted", key="id", out=sys.argv[2]
    ).run()
    print(info.counts.completed)
"""


@pytest.mark.trial
async def test_a_killed_client_takes_up_its_job(
    one: Service, connection: asyncpg.Connection, tmp_path: Path
) -> None:
    number, out = 2500, tmp_path / "answers.jsonl"
    answers = await run_killed(one, PROGRAM, number, out, at=(400, 900, 1400))
    assert all(line["text"] == line["key"].replace("k", "topic-") for line in answers)
    count = await connection.fetchval("SELECT count(*) FROM results")
    assert count == number


# Once as the service sends it, once shorter.
@pytest.mark.parametrize("retry_after", [admission._RETRY_SECONDS, 1])
@pytest.mark.trial
async def test_a_queue_that_is_full_is_waited_for(
    settings: Settings, monkeypatch: pytest.MonkeyPatch, retry_after: int
) -> None:
    monkeypatch.setattr(admission, "_RETRY_SECONDS", retry_after)
    narrow = settings.model_copy(update={"team_max_queued": 100})

    async with serve(narrow, with_worker=True) as service:

        def work(client: Client) -> int:
            return client.map(ROWS[:150], PROMPT, model="scripted").run().counts.completed

        assert await blocking(service, work) == 150  # one list, more than the queue takes


def some_rows() -> Iterator[str]:
    yield "a"
    raise ZeroDivisionError


async def test_an_error_of_the_data_is_the_callers(one: Service) -> None:
    def work(client: Client) -> None:
        with pytest.raises(ZeroDivisionError):
            client.map(some_rows(), model="scripted")

    await blocking(one, work)


@pytest.mark.trial
async def test_a_revoked_key_ends_the_call_and_another_continues(
    settings: Settings, tmp_path: Path
) -> None:
    guarded = settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    out = tmp_path / "answers.jsonl"
    async with serve(guarded, with_worker=True) as service:
        first, second = (sign({"team_id": "red", "token_id": name}) for name in ("t1", "t2"))
        loop = asyncio.get_running_loop()

        def work(client: Client) -> None:
            job = client.map(ROWS, PROMPT, model="scripted", key="id", out=out)
            for number, _ in enumerate(job):
                if number == 100:
                    revoking = service.services.tokens.revoke_token("red", "t1")
                    asyncio.run_coroutine_threadsafe(revoking, loop).result()
            list(client.job(job.id))  # if it was fast

        def again(client: Client) -> int:
            job = client.map(ROWS, PROMPT, model="scripted", key="id", out=out)
            return job.run().counts.completed

        with pytest.raises(AuthenticationError, match="revoked"):
            await blocking(service, work, first)
        assert await blocking(service, again, second) == len(ROWS)
    assert Counter(line["key"] for line in lines(out)) == Counter(row["id"] for row in ROWS)
