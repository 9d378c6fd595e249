"""Limits of a team: queued results, requests and tokens per minute, over several processes."""

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import httpx
import pytest

from app.auth.principal import Principal
from app.core.errors import LimitError, QueueFullError
from app.core.ids import new_id
from app.core.settings import Settings
from app.queue import admission
from app.queue.enqueue import NewContext, NewResult
from app.queue.rate_buckets import Cost, RateBuckets
from app.queue.team_limits import ANY_MODEL, Limits
from tests.conftest import Service, run_service
from tests.integration.queue.queue_bench import make_result
from tests.integration.support import until

BODY = {"model": "scripted", "content": "text", "parameters": {"max_tokens": 5}}


@pytest.fixture
async def two(settings: Settings) -> AsyncIterator[tuple[Service, Service]]:
    """Two API processes without a worker: what is accepted stays queued."""
    async with (
        run_service(settings, with_worker=False) as one,
        run_service(settings, with_worker=False) as other,
    ):
        yield one, other


async def set_limits(services: tuple[Service, ...], **values: int) -> None:
    """Set the default team's limits, and wait until every process knows them."""
    await services[0].services.limits.set("default", ANY_MODEL, values)

    async def is_known() -> bool:
        return all(
            all(
                getattr(one.services.limits.of("default", "scripted"), name) == value
                for name, value in values.items()
            )
            for one in services
        )

    await until(is_known)


async def send(service: Service, body: Any = BODY) -> httpx.Response:
    return await service.client.post("/results/", json=body)


async def test_no_more_wait_than_may(two: tuple[Service, Service]) -> None:
    await set_limits(two, max_queued=3)
    answers = [await send(two[0]) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [202, 202, 202, 429]
    problem = answers[-1].json()
    assert problem["code"] == "limit_reached"
    assert (problem["limit"], problem["allowed"], problem["position"]) == ("max_queued", 3, 4)
    assert int(answers[-1].headers["retry-after"]) >= 1
    # The other process counts the same rows.
    assert (await send(two[1])).status_code == 429
    # Room is seen at once: a request is refused only by a new count.
    await two[0].services.queue.cancel("default", model_name="scripted")
    await until(lambda: is_accepted(two[1]))


def ok(answer: httpx.Response) -> bool:
    return answer.status_code == 202


async def is_accepted(service: Service) -> bool:
    return ok(await send(service))


async def test_many_at_once_do_not_slip_in(two: tuple[Service, Service]) -> None:
    await set_limits(two, max_queued=20)
    answers = await asyncio.gather(*(send(two[0]) for _ in range(100)))
    assert sum(ok(answer) for answer in answers) == 20
    # With two processes, by no more than what the other accepts while one counts.
    await two[0].services.queue.cancel("default", model_name="scripted")
    await until(lambda: is_accepted(two[0]))
    answers = await asyncio.gather(*(send(two[place % 2]) for place in range(200)))
    assert 19 <= sum(ok(answer) for answer in answers) <= 38


async def test_a_list_is_refused_whole(two: tuple[Service, Service]) -> None:
    await set_limits(two, max_queued=3)
    assert (await send(two[0], [BODY] * 4)).status_code == 429
    assert (await two[0].client.get("/results/")).json() == []
    assert (await send(two[0], [BODY] * 3)).status_code == 202


async def test_requests_per_minute_are_exact_over_processes(two: tuple[Service, Service]) -> None:
    await set_limits(two, requests_per_minute=30)
    answers = await asyncio.gather(*(send(two[place % 2]) for place in range(80)))
    # A bucket fills while it is emptied: 30 a minute are one in two seconds.
    assert 30 <= sum(ok(answer) for answer in answers) <= 45
    refused = next(answer for answer in answers if not ok(answer))
    assert refused.status_code == 429
    assert refused.json()["limit"] == "requests_per_minute"
    assert 1 <= int(refused.headers["retry-after"]) <= 2


async def test_tokens_per_minute_count_prompt_and_answer(two: tuple[Service, Service]) -> None:
    await set_limits(two, tokens_per_minute=100)
    body = BODY | {"parameters": {"max_tokens": 90}}
    assert ok(await send(two[0], body))
    refused = await send(two[1], body)
    assert refused.json()["limit"] == "tokens_per_minute"
    assert 40 <= int(refused.headers["retry-after"]) <= 60


async def test_what_costs_more_than_a_minute_holds_passes_when_the_bucket_is_full(
    two: tuple[Service, Service],
) -> None:
    await set_limits(two, tokens_per_minute=10)
    body = BODY | {"parameters": {"max_tokens": 50}}
    assert ok(await send(two[0], body))
    refused = await send(two[0], body)
    # First the debt, then a full bucket.
    assert 250 <= int(refused.headers["retry-after"]) <= 310


async def test_other_teams_have_their_own(two: tuple[Service, Service]) -> None:
    await set_limits(two, max_queued=1)
    assert ok(await send(two[0]))
    assert not ok(await send(two[0]))
    limits = await two[0].services.admission.limits_of("other", "scripted")
    assert limits.max_queued is None


async def test_no_team_fills_the_whole_queue_alone(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of it is one team's, over all models; another team has the rest. A limit of its own replaces it."""
    monkeypatch.setattr(admission, "_SHARED_QUEUE", 6)
    monkeypatch.setattr(admission, "_SHARE_SECONDS", 0.0)
    async with run_service(settings.model_copy(update={"max_queued": 6}), with_worker=False) as api:

        async def admit(team: str, model: str, limits: Limits | None = None) -> None:
            context = NewContext(new_id(), team, "a prompt", None, "{}")
            members = {"team_id": team, "limits": limits or Limits(), "model_name": model}
            one = make_result(new_context=context, context_id=context.id, **members)
            api.services.depth._snapshot.expires = 0.0  # it is counted now
            async with api.services.admission.admitted([one]):
                assert await api.services.queue.enqueue([one]) == [True]

        for model in "mnm":
            await admit("many", model)
        for model in "mno":
            with pytest.raises(
                LimitError, match=r"^3 results of team 'many' wait, of 3"
            ) as refused:
                await admit("many", model)
            assert refused.value.extra == {"limit": "max_queued", "allowed": 3, "position": 4}
        await admit("other", "m")
        await admit("many", "n", Limits(max_queued=5))
        with pytest.raises(LimitError):
            await admit("many", "m")
        await admit("third", "m")
        with pytest.raises(QueueFullError):
            await admit("third", "m")


async def test_limits_change_and_go_while_the_service_runs(two: tuple[Service, Service]) -> None:
    await set_limits(two, max_queued=1)
    assert ok(await send(two[0]))
    assert not ok(await send(two[1]))
    assert await two[0].services.limits.remove("default", ANY_MODEL)
    await until(lambda: is_accepted(two[1]))


async def test_a_place_that_is_free_again_is_filled_at_once(settings: Settings) -> None:
    """Not by the poll, which is a minute here: by the end of what ran, in any worker."""
    settings = settings.model_copy(update={"poll_seconds": 60.0})
    async with (
        run_service(settings, with_worker=True) as one,
        run_service(settings, with_worker=True) as other,
    ):
        await set_limits((one, other), max_running=1)
        body = BODY | {"content": "{{chunks=2 delay_ms=5}}"}
        sent = (await send(one, [body] * 20)).json()

        async def are_completed() -> bool:
            listed = (await one.client.get("/results/?state=completed")).json()
            return len(listed) == len(sent)

        await until(are_completed, 30)


async def test_limits_hold_from_the_first_claim(settings: Settings) -> None:
    """A process that has not read the limits yet admits no request without them."""
    async with run_service(settings, with_worker=False) as api:
        await api.services.limits.set("default", ANY_MODEL, {"max_queued": 2})
    async with run_service(settings, with_worker=False) as api:
        api.services.limits._is_loaded = False
        api.services.limits._rows, api.services.limits._limits = {}, {}
        answers = [await send(api) for _ in range(3)]
        assert [answer.status_code for answer in answers] == [202, 202, 429]


async def test_synchronous_waits_obey_the_running_limit(settings: Settings) -> None:
    """A result that may not run yet is queued, although slots are free, and runs later."""
    async with run_service(settings, with_worker=True) as service:
        await set_limits((service,), max_running=1)
        script = "{{chunks=4 delay_ms=30}}"
        answers = await asyncio.gather(
            *(
                service.client.post(
                    "/results/",
                    json=BODY | {"content": script},
                    headers={"Prefer": "wait=60"},
                )
                for _ in range(5)
            )
        )
        assert {answer.json()["state"] for answer in answers} == {"completed"}
        spans = sorted(
            (answer.json()["started_at"], answer.json()["finished_at"]) for answer in answers
        )
        for (_, ended), (started, _) in itertools.pairwise(spans):
            assert ended <= started


@pytest.mark.trial
async def test_a_single_result_starts_within_two_service_times_of_a_full_queue(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    """Team a holds 5,000; b's one is overtaken by at most twice as many as run at a time."""
    slots = 4
    script = "{{chunks=5 delay_ms=10}}"
    settings = settings.model_copy(update={"worker_slots": slots})
    async with run_service(settings, with_worker=True) as service:
        queue = service.services.queue
        for _ in range(5):
            assert all(await queue.enqueue([of_team("a", script) for _ in range(1000)]))
        single = of_team("b", script)
        assert await queue.enqueue([single]) == [True]
        began = await connection.fetchval("SELECT clock_timestamp()")
        row = await service.services.hub.wait_terminal("b", single.id, 60.0)
        assert row.state == "completed"
        overtaken_by = await connection.fetchval(
            """SELECT count(*) FROM results
               WHERE team_id = 'a' AND started_at > $1
                 AND started_at < (SELECT started_at FROM results WHERE id = $2)""",
            began,
            single.id,
        )
        assert overtaken_by <= 2 * slots
        # The backlog is cancelled: the next of team a waits for nothing that is gone.
        await queue.cancel("a", model_name="scripted")
        again = of_team("a", script)
        assert await queue.enqueue([again]) == [True]
        row = await service.services.hub.wait_terminal("a", again.id, 60.0)
        assert row.state == "completed"


def of_team(team: str, content: str) -> NewResult:
    context = NewContext(new_id(), team, content, None, "{}")
    return NewResult(
        new_id(), team, context.id, "scripted", '{"max_tokens": 5}', 600.0, new_context=context
    )


async def test_priority_above_the_tokens_is_refused(service: Service) -> None:
    refused = await send(service, BODY | {"priority": 1})
    assert refused.status_code == 422
    assert "max_priority" in refused.json()["detail"]
    assert Principal("t", frozenset({"use"})).max_priority == 0


@pytest.mark.trial
async def test_the_command_line_sets_lists_and_unsets(
    service: Service, settings: Settings, capfd: pytest.CaptureFixture[str]
) -> None:
    limits = service.services.limits
    assert await team(settings, "set", "default", "--max-queued", "7", "--weight", "2.5") == 0

    async def is_known() -> bool:
        return limits.of("default", "scripted").max_queued == 7

    await until(is_known)
    assert await team(settings, "set", "default", "--model", "other", "--max-running", "1") == 0
    reuse = ("--reuse", "on")
    assert await team(settings, "set", "default", "--model", "third", *reuse) == 0
    assert await team(settings, "list") == 0
    lines = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert lines[1:] == [
        ["default", "*", "2.5", "7", "-", "-", "-", "-"],
        ["default", "other", "-", "-", "1", "-", "-", "-"],
        ["default", "third", "-", "-", "-", "-", "-", "on"],
    ]
    # A row of a model overrides the team's, member by member.
    await limits.refresh()
    assert limits.of("default", "other") == Limits(2.5, max_queued=7, max_running=1)
    assert limits.of("default", "third") == Limits(2.5, max_queued=7, reuse=True)
    assert await team(settings, "unset", "default") == 0
    assert await team(settings, "unset", "default") == 1
    assert await team(settings, "set", "default") == 2
    assert await team(settings, "set", "default", "--weight", "0") == 2
    assert await team(settings, "set", "default", "--reuse", "yes") == 2
    assert "positive number" in capfd.readouterr().err


async def team(settings: Settings, *arguments: str) -> int:
    """Run `python -m app team` on the test's database; its exit status."""
    environment = os.environ | {
        "LLM_DATABASE_URL": settings.database_host,
        "LLM_DATABASE_ADMIN_USER": settings.database_user,
        "LLM_DATABASE_PASSWORD": settings.database_password.get_secret_value(),
        "LLM_DATABASE_DB": settings.database_name,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "team", *arguments, env=environment
    )
    return await process.wait()


async def test_a_fill_that_waited_does_not_set_a_buckets_time_back(service: Service) -> None:
    """Two fills overlap: the one that read the clock first writes last, and must add nothing."""
    bucket = ("default", "scripted", "requests_per_minute")
    cost = Cost(bucket, capacity=60.0, amount=60.0)
    async with service.services.database.connection() as connection:
        assert await RateBuckets().take(connection, [[cost]], False) == [None]
        later = await connection.fetchval(
            "UPDATE rate_buckets SET filled_at = filled_at + interval '30 s' RETURNING filled_at"
        )
        (shortage,) = await RateBuckets().take(connection, [[cost]], False)
        assert shortage is not None
        assert shortage.seconds > 59
        assert await connection.fetchval("SELECT filled_at FROM rate_buckets") == later


async def test_a_taking_changes_the_buckets_of_its_team_alone(service: Service) -> None:
    buckets = [(team, "scripted", "requests_per_minute") for team in ("a", "b")]
    async with service.services.database.connection() as connection:
        for amount, bucket in enumerate(buckets, 1):
            costs = [[Cost(bucket, capacity=60.0, amount=10.0 * amount)]]
            assert await RateBuckets().take(connection, costs, False) == [None]
        rows = await connection.fetch("SELECT team_id, level FROM rate_buckets ORDER BY 1")
    assert [(row["team_id"], round(row["level"], -1)) for row in rows] == [("a", 50), ("b", 40)]
