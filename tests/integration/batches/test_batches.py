"""/v1/files and /v1/batches, by the official client, against the service on a real port."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import openai
import pytest
from openai.types import Batch
from pydantic import SecretStr

from app.api.batch_dialects import batch_services
from app.batches.dispatcher import Dispatcher
from app.batches.feed import BatchFeed
from app.batches.processor import BatchProcessor
from app.batches.rows import Line, NewLine
from app.core.errors import NotFoundError
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue.team_limits import ANY_MODEL
from tests.conftest import Service
from tests.integration.support import assert_openai_error, openai_client, serve, until
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

MODEL = "scripted"


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Service]:
    async with serve(settings, with_worker=True) as service:
        yield service


@pytest.fixture
async def client(running: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(running) as one:
        yield one


def line(custom_id: str, prompt: str = "a", **members: object) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4} | members
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def jsonl(lines: Sequence[object]) -> bytes:
    return b"".join(
        one if isinstance(one, bytes) else json.dumps(one).encode() + b"\n" for one in lines
    )


async def begin(client: openai.AsyncOpenAI, lines: Sequence[object], **members: Any) -> Batch:
    file = await client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/completions",
        completion_window="24h",
        **members,
    )


async def end_of(client: openai.AsyncOpenAI, batch: Batch, seconds: float = 60) -> Batch:
    async def ended() -> Batch | None:
        found = await client.batches.retrieve(batch.id)
        return found if found.status in ("completed", "failed", "expired", "cancelled") else None

    found: Batch = await until(ended, seconds)
    return found


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = (await client.files.content(file_id)).content
    assert content.endswith(b"\n")
    return [json.loads(one) for one in content.splitlines()]


async def test_a_batch_is_answered_line_by_line(
    client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    lines = [line(f"c{number}", f"prompt {number}") for number in range(250)]
    lines[7] = line("c7", max_tokens=0)
    lines[8] = line("c8", model="nobody")
    lines[9] = line("c9", "{{chunks=3 fail_at=1}}")
    lines[10] = line("c10", n=3)
    batch = await begin(client, lines, metadata={"why": "test"})
    assert batch.status == "validating"
    assert batch.object == "batch"
    assert batch.metadata == {"why": "test"}
    ended = await end_of(client, batch)
    assert ended.status == "completed", ended
    assert ended.request_counts
    counts = ended.request_counts
    assert (counts.total, counts.completed, counts.failed) == (250, 247, 3)
    assert ended.completed_at
    assert ended.in_progress_at
    assert ended.finalizing_at
    output = {one["custom_id"]: one for one in await read(client, ended.output_file_id)}
    errors = {one["custom_id"]: one for one in await read(client, ended.error_file_id)}
    assert set(errors) == {"c7", "c8", "c9"}
    assert set(output) == {f"c{number}" for number in range(250)} - set(errors)
    assert errors["c8"]["response"]["status_code"] == 404
    assert len(output["c10"]["response"]["body"]["choices"]) == 3
    assert all(one["response"]["status_code"] == 200 for one in output.values())
    assert all(one["response"]["body"]["choices"][0]["text"] for one in output.values())
    # One result for each choice of each line, and no line is left behind.
    assert await connection.fetchval("SELECT count(*) FROM results") == 248 + 2
    assert await connection.fetchval("SELECT count(*) FROM batch_lines") == 0
    assert await connection.fetchval("SELECT count(*) FROM files WHERE size IS NULL") == 0


async def test_what_is_wrong_with_a_file_is_told_line_by_line(
    running: Service, client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    wrong = [
        line("a"),
        b"{not json\n",
        b"\n",
        line("a"),
        line("") | {"custom_id": ""},
        line("b") | {"method": "GET"},
        line("c") | {"url": "/v1/chat/completions"},
        {"custom_id": "d", "method": "POST", "url": "/v1/completions"},
        line("e", stream=True),
        line("f") | {"custom_id": "nul\x00"},
        b"\xff\n",
        line("g", deep=json.loads("[" * 300 + "]" * 300)),
    ]
    batch = await begin(client, wrong)
    failed = await end_of(client, batch)
    assert failed.status == "failed"
    assert failed.failed_at
    assert failed.errors
    assert failed.errors.data
    listed = [(one.line, one.code, one.param) for one in failed.errors.data]
    assert listed == [
        (2, "invalid_json_line", None),
        (4, "duplicate_custom_id", "custom_id"),
        (5, "invalid_request", "custom_id"),
        (6, "invalid_request", "method"),
        (7, "invalid_url", "url"),
        (8, "invalid_request", "body"),
        (9, "invalid_request", "body.stream"),
        (10, "invalid_request", "custom_id"),
        (11, "invalid_json_line", None),
        (12, "invalid_json_line", "body"),
    ]
    assert all(one.message for one in failed.errors.data)
    assert failed.output_file_id is None
    assert await connection.fetchval("SELECT count(*) FROM results") == 0
    assert await connection.fetchval("SELECT count(*) FROM batch_lines") == 0
    empty = await end_of(client, await begin(client, [b"\n\n"]))
    assert empty.errors
    assert empty.errors.data
    assert [one.code for one in empty.errors.data] == ["empty_file"]


async def test_a_file_that_goes_before_it_is_read(settings: Settings) -> None:
    async with serve(settings) as service, openai_client(service) as client:
        batch = await begin(client, [line("a")])
        await client.files.delete(batch.input_file_id)
        feeding = asyncio.create_task(BatchProcessor(batch_services(service.services)).run())
        ended = await end_of(client, batch)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    assert ended.status == "failed"
    assert ended.errors
    assert ended.errors.data
    assert [one.code for one in ended.errors.data] == ["file_not_found"]


async def test_too_many_and_too_long_lines_are_refused(settings: Settings) -> None:
    small = settings.model_copy(update={"max_batch_lines": 3, "max_body_bytes": 2_000})
    async with serve(small, with_worker=True) as service, openai_client(service) as client:
        many = await end_of(client, await begin(client, [line(str(n)) for n in range(4)]))
        assert many.errors
        assert many.errors.data
        assert [(one.code, one.line) for one in many.errors.data] == [
            ("too_many_requests_in_batch", 4)
        ]
        long = await end_of(client, await begin(client, [line("a"), line("b", "x" * 2_000)]))
        assert long.errors
        assert long.errors.data
        assert [(one.code, one.line) for one in long.errors.data] == [("line_too_long", 2)]


@pytest.mark.trial
async def test_a_batch_takes_no_more_than_the_queue_has_room_for(
    settings: Settings, connection: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refusals of a full queue are waited out: no line fails, and no more are under way at once."""
    starts: list[Dispatcher] = []  # searches for waiting lines from the first on
    reset = Dispatcher.reset

    def note(dispatcher: Dispatcher) -> None:
        starts.append(dispatcher)
        reset(dispatcher)

    monkeypatch.setattr(Dispatcher, "reset", note)
    narrow = settings.model_copy(
        update={"max_queued": 15, "worker_slots": 4, "batch_in_flight": 40}
    )
    async with serve(narrow, with_worker=True) as service, openai_client(service) as client:
        batch = await begin(client, [line(str(n), "{{chunks=4 delay_ms=5}}") for n in range(60)])
        most = 0

        async def is_over() -> bool:
            nonlocal most
            pending = await connection.fetchval(
                "SELECT count(*) FROM results WHERE state = 'pending'"
            )
            most = max(most, pending)
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await until(is_over, 60)
        assert 0 < most <= 20  # what waits, what runs, and one that has ended just now
        counts = (await client.batches.retrieve(batch.id)).request_counts
        assert counts
        assert (counts.total, counts.completed, counts.failed) == (60, 60, 0)
    assert len(starts) == 2, "at its begin and at its end: a refused line is not passed over"


async def test_a_page_of_lines_is_bounded_by_its_bytes(settings: Settings) -> None:
    async with serve(settings) as service, openai_client(service) as client:
        batch = UUID((await begin(client, [line("a")])).id.removeprefix("batch_"))
        work = service.services.batch_work
        await work.add_lines(batch, [NewLine(n, str(n), '"' + "x" * 98 + '"') for n in (1, 2, 3)])
        for max_bytes, numbers in ((1, [1]), (100, [1]), (101, [1, 2]), (1_000, [1, 2, 3])):
            found = await work.waiting(batch, 0, 100, max_bytes)
            assert [one.line for one in found] == numbers
        assert [one.line for one in await work.waiting(batch, 2, 100, 1)] == [3]
        assert len(await work.body(batch, 3)) == 100
        with pytest.raises(NotFoundError):
            await work.body(batch, 4)


async def test_a_cancelled_batch_keeps_what_is_done(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    few = settings.model_copy(update={"batch_in_flight": 4})
    lines = [
        line("quick"),
        *(line(str(n), "{{chunks=500 delay_ms=20}}", max_tokens=500) for n in range(9)),
    ]
    async with serve(few, with_worker=True) as service, openai_client(service) as client:
        batch = await begin(client, lines)

        async def is_one_done() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return bool(counts and counts.completed)

        await until(is_one_done)
        first = await client.batches.cancel(batch.id)
        assert first.status in ("cancelling", "cancelled")
        again = await client.batches.cancel(batch.id)
        assert again.status in ("cancelling", "cancelled")
        ended = await end_of(client, batch)
        assert ended.status == "cancelled"
        assert ended.cancelled_at
        assert ended.cancelling_at
        assert [one["custom_id"] for one in await read(client, ended.output_file_id)] == ["quick"]
        errors = await read(client, ended.error_file_id)
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        assert {one["custom_id"] for one in errors} == {str(n) for n in range(9)}
        assert (
            await connection.fetchval("SELECT count(*) FROM results WHERE state = 'pending'") == 0
        )
        done = await end_of(client, await begin(client, [line("a")]))
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(done.id)


async def test_a_batch_whose_time_is_over_expires(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    few = settings.model_copy(update={"batch_in_flight": 3})
    lines = [
        line("quick"),
        *(line(str(n), "{{chunks=500 delay_ms=20}}", max_tokens=500) for n in range(5)),
    ]
    async with serve(few, with_worker=True) as service, openai_client(service) as client:
        batch = await begin(client, lines)

        async def is_one_done() -> bool:
            counts = (await client.batches.retrieve(batch.id)).request_counts
            return bool(counts and counts.completed)

        await until(is_one_done)
        await connection.execute("UPDATE batches SET expires_at = now()")
        await connection.execute("SELECT pg_notify('llm_batches', id::text) FROM batches")
        ended = await end_of(client, batch)
        assert ended.status == "expired"
        assert ended.expired_at
        assert [one["custom_id"] for one in await read(client, ended.output_file_id)] == ["quick"]
        errors = await read(client, ended.error_file_id)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"}
        assert len(errors) == 5


@pytest.mark.trial
async def test_a_batch_goes_on_where_its_process_died_and_sends_nothing_twice(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    few = settings.model_copy(update={"batch_in_flight": 10})
    async with serve(few) as service, openai_client(service) as client:
        batch = await begin(client, [line(str(n)) for n in range(40)])
        feeding = asyncio.create_task(BatchProcessor(batch_services(service.services)).run())

        async def are_sent() -> bool:
            sent = "SELECT count(*) FROM batch_lines WHERE state = 'sent'"
            return bool(await connection.fetchval(sent) == 10)

        await until(are_sent)
        feeding.cancel()
        await asyncio.gather(feeding, return_exceptions=True)
    # As a process leaves them that is killed between sending its lines and noting so, or between
    # giving them ids and sending them; and its lease with them.
    await connection.execute("UPDATE batch_lines SET state = 'waiting' WHERE line <= 5")
    await connection.executemany(
        "UPDATE batch_lines SET result_ids = ARRAY[$2::uuid] WHERE line = $1",
        [(number, new_id()) for number in range(20, 26)],
    )
    await connection.execute(
        "UPDATE batches SET feeder_id = gen_random_uuid(), lease_expires_at = now() + interval '1 s'"
    )
    async with serve(settings, with_worker=True) as service, openai_client(service) as client:
        ended = await end_of(client, batch)
        assert ended.status == "completed"
        output = await read(client, ended.output_file_id)
        assert sorted(int(one["custom_id"]) for one in output) == list(range(40))
        assert ended.request_counts
        assert ended.request_counts.completed == 40
    assert await connection.fetchval("SELECT count(*) FROM results") == 40
    assert await connection.fetchval("SELECT count(*) FROM contexts") == 40


async def test_lines_that_a_late_feeder_sent_are_not_forgotten(
    running: Service, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A feeder that was frozen, and does not know yet that the batch is another's, sends a page."""
    services = running.services
    look, is_late = services.batch_work.waiting, asyncio.Event()

    async def after_the_late_one(batch_id: UUID, after: int, limit: int) -> list[Line]:
        if after == 100 and not is_late.is_set():
            is_late.set()
            found = await services.batches.get("default", batch_id)
            late = BatchFeed(batch_services(services), new_id(), batch_id)._dispatcher
            late._after = after
            await late.send(replace(found, seconds_left=3600))
        return await look(batch_id, after, limit)

    monkeypatch.setattr(services.batch_work, "waiting", after_the_late_one)
    ended = await end_of(client, await begin(client, [line(f"c{n}") for n in range(250)]))
    assert is_late.is_set()
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert ended.request_counts.completed == 250
    assert len(await read(client, ended.output_file_id)) == 250


@pytest.mark.trial
async def test_two_processes_share_the_batches(settings: Settings) -> None:
    async with (
        serve(settings, with_worker=True) as near,
        serve(settings, with_worker=True) as far,
        openai_client(near) as client,
        openai_client(far) as other,
    ):
        batches = [await begin(client, [line(str(n)) for n in range(30)]) for _ in range(4)]
        ended = [await end_of(other, batch) for batch in batches]
        assert {one.status for one in ended} == {"completed"}
        for one in ended:
            assert len(await read(client, one.output_file_id)) == 30


async def test_lines_that_are_not_to_be_stored_are_erased_once_they_are_told(
    client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    ended = await end_of(client, await begin(client, [line("a", store=False), line("b")]))
    output = {one["custom_id"]: one for one in await read(client, ended.output_file_id)}
    assert output["a"]["response"]["body"]["choices"][0]["text"]
    rows = await connection.fetch(
        "SELECT output, r.erased_at, c.content FROM results r JOIN contexts c ON c.id = context_id"
        " ORDER BY store"
    )
    assert (rows[0]["output"], rows[0]["content"]) == (None, "")
    assert rows[0]["erased_at"]
    assert rows[1]["output"]
    assert rows[1]["content"]
    assert rows[1]["erased_at"] is None


async def test_batches_of_others_are_nobodys(
    client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    ended = await end_of(client, await begin(client, [line("a")]))
    assert ended.output_file_id
    await connection.execute("UPDATE batches SET team_id = 'other'")
    await connection.execute("UPDATE files SET team_id = 'other'")
    assert (await client.batches.list()).data == []
    assert (await client.files.list()).data == []
    for call in (
        client.batches.retrieve(ended.id),
        client.batches.cancel(ended.id),
        client.files.retrieve(ended.output_file_id),
        client.files.content(ended.output_file_id),
        client.files.delete(ended.output_file_id),
        client.batches.create(
            input_file_id=ended.input_file_id,
            endpoint="/v1/completions",
            completion_window="24h",
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_batches_are_listed_newest_first(client: openai.AsyncOpenAI) -> None:
    made = [await begin(client, [line("a")]) for _ in range(5)]
    page = await client.batches.list(limit=2)
    assert [one.id for one in page.data] == [made[4].id, made[3].id]
    assert page.has_more
    assert [one.id async for one in page] == [one.id for one in reversed(made)]
    for one in made:
        await end_of(client, one)


@pytest.mark.trial
async def test_teams_have_their_own_batches_within_their_limits(settings: Settings) -> None:
    guarded = settings.model_copy(
        update={"jwt_secret": SecretStr(STRONG), "worker_slots": 4, "batch_in_flight": 40}
    )
    async with (
        serve(guarded, with_worker=True) as service,
        openai_client(service) as red,
        openai_client(service) as blue,
    ):
        unnamed = await service.client.post("/v1/files", files={"file": b"x"})
        assert_openai_error(unnamed, 401, "invalid_api_key")
        red.api_key = sign({"team_id": "red", "token_id": "r"})
        blue.api_key = sign({"team_id": "blue", "token_id": "b"})
        limits = service.services.limits
        await limits.set("red", ANY_MODEL, {"max_queued": 10})

        async def is_known() -> bool:
            return limits.of("red", MODEL).max_queued == 10

        await until(is_known)
        # Its choices are more than may ever wait at once: that one fails.
        batch = await begin(red, [*(line(str(n)) for n in range(60)), line("many", n=11)])
        for call in (
            blue.batches.retrieve(batch.id),
            blue.batches.cancel(batch.id),
            blue.files.content(batch.input_file_id),
            blue.batches.create(
                input_file_id=batch.input_file_id,
                endpoint="/v1/completions",
                completion_window="24h",
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        ended = await end_of(red, batch)
        assert ended.status == "completed"
        assert ended.request_counts
        assert (ended.request_counts.completed, ended.request_counts.failed) == (60, 1)
        (refused,) = await read(red, ended.error_file_id)
        assert (refused["custom_id"], refused["response"]["status_code"]) == ("many", 429)
        with pytest.raises(openai.NotFoundError):
            await blue.files.content(ended.output_file_id or "")
        assert len(await read(red, ended.output_file_id)) == 60


async def test_the_same_request_under_a_key_is_answered_with_its_batch(
    running: Service, client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    file = await client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    body = {
        "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h",
    }  # fmt: skip

    async def create(key: str = "k", **members: object) -> httpx.Response:
        headers = {"Idempotency-Key": key}
        return await running.client.post("/v1/batches", json=body | members, headers=headers)

    # All at one moment: one of them makes it.
    answers = await asyncio.gather(*(create() for _ in range(8)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.json()["id"] for answer in answers}) == 1
    replayed = [answer.headers.get("Idempotent-Replayed") for answer in answers]
    assert sorted(replayed, key=str) == [None] + ["true"] * 7
    assert await connection.fetchval("SELECT count(*) FROM batches") == 1
    first = answers[0].json()["id"]

    error = assert_openai_error(await create(metadata={"a": "b"}), 409, "idempotency_conflict")
    assert first in error["message"]
    other = await create("other")
    assert other.json()["id"] != first
    # A batch is returned in its stored state, also when its file is gone.
    await end_of(client, await client.batches.retrieve(first))
    await client.files.delete(file.id)
    again = await create()
    assert (again.status_code, again.json()["id"]) == (200, first)
    assert again.json()["status"] == "completed"
    assert_openai_error(await create("new"), 404)
    assert_openai_error(await create("x" * 256), 400, param="Idempotency-Key")

    # A key is free again when its time is over.
    await connection.execute("UPDATE batches SET key_expires_at = now() - interval '1 s'")
    file = await client.files.create(file=("in.jsonl", jsonl([line("a")])), purpose="batch")
    renewed = await create(input_file_id=file.id)
    assert renewed.status_code == 200
    assert renewed.json()["id"] != first
    assert "Idempotent-Replayed" not in renewed.headers


async def test_a_key_is_its_teams_and_holds_at_every_process(settings: Settings) -> None:
    settings = settings.model_copy(update={"auth": "on", "jwt_secret": SecretStr(STRONG)})
    async with serve(settings) as one, serve(settings) as other:
        made = set()
        for team in ("red", "blue"):
            headers = {
                "Authorization": f"Bearer {sign({'team_id': team, 'token_id': 't'})}",
                "Idempotency-Key": "k",
            }
            file = await one.client.post(
                "/v1/files",
                files={"file": ("f", b"{}")},
                data={"purpose": "batch"},
                headers=headers,
            )
            body = {
                "input_file_id": file.json()["id"], "endpoint": "/v1/completions",
                "completion_window": "24h",
            }  # fmt: skip
            answers = await asyncio.gather(
                *(api.client.post("/v1/batches", json=body, headers=headers)
                  for api in (one, other, one, other))
            )  # fmt: skip
            assert {answer.status_code for answer in answers} == {200}
            made |= {answer.json()["id"] for answer in answers}
        assert len(made) == 2


async def test_a_team_has_only_so_many_batches_open(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    settings = settings.model_copy(update={"team_max_batches": 3})
    async with serve(settings) as one, serve(settings) as other:  # without a worker: they stay
        async with openai_client(one) as client:
            file = await client.files.create(file=("f", jsonl([line("a")])), purpose="batch")
        body = {
            "input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h",
        }  # fmt: skip
        answers = await asyncio.gather(
            *(api.client.post("/v1/batches", json=body) for api in (one, other) * 5)
        )
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 7
        refused = next(answer for answer in answers if answer.status_code == 429)
        error = assert_openai_error(refused, 429, "rate_limit_exceeded")
        assert "3 batches" in error["message"]
        assert int(refused.headers["Retry-After"]) > 0
        # Another team's are not counted, nor those that have ended.
        await connection.execute(
            "UPDATE batches SET team_id = 'blue' WHERE id = ANY(ARRAY(SELECT id FROM batches LIMIT 1))"
        )
        await connection.execute(
            "UPDATE batches SET state = 'cancelled', ended_at = now() WHERE id = ANY(ARRAY("
            "SELECT id FROM batches WHERE team_id <> 'blue' LIMIT 1))"
        )
        for status in (200, 200, 429):
            answer = await one.client.post("/v1/batches", json=body)
            assert answer.status_code == status


async def test_no_line_outlives_its_batch(
    running: Service, client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    """Requests may have a longer deadline than a batch has time."""
    assert running.services.settings.max_deadline_seconds > 2 * 86_400
    await end_of(client, await begin(client, [line("a")]))
    late = "SELECT count(*) FROM results r, batches b WHERE r.deadline_at > b.expires_at + '1 s'"
    assert await connection.fetchval("SELECT count(*) FROM results") == 1
    assert await connection.fetchval(late) == 0
