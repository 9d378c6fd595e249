"""The account of a storm: what is asked of the database, the API and the logs once it is over."""

import random
from datetime import UTC, datetime

import orjson

from app.core.database import Database
from app.results.retention.cleanup import cleaning_steps
from tests.chaos.history import FORBIDDEN, first_traceback
from tests.chaos.stack import Stack
from tests.chaos.storm import invariants, job_invariants, reuse_invariants
from tests.chaos.storm.client import Scene
from tests.chaos.storm.invariants import Account, Ledger
from tests.chaos.storm.outcome import Outcome
from tests.chaos.storm.raw_http import ask
from tests.conftest import make_settings
from tests.integration.webhook_receiver import Receiver

_FOREIGN_READS = 200


async def draw_up(outcome: Outcome, stack: Stack, receiver: Receiver) -> None:
    """Fill in the account, the ends and the figures."""
    account, scene = outcome.account, outcome.scene
    swept = await _sweep(stack)
    rows = await stack.fetch(invariants.ROWS)
    ledger = Ledger([dict(row) for row in rows])
    invariants.check(account, scene.log.orders, ledger)
    reuse_invariants.check_reuse(account, scene.log.orders, ledger)
    invariants.check_webhooks(account, scene.log.orders, ledger, receiver)
    for what, query in FORBIDDEN.items():
        account.look(f"never {what}", len(rows))
        for found in await stack.fetch(query):
            account.accuse(f"never {what}", dict(found))
    await _check_totals(account, stack)
    await _check_usage(account, stack)
    await _check_teams(account, stack, scene, ledger)
    job_invariants.check_jobs(account, scene.log.orders, await job_invariants.read(stack), receiver)
    await job_invariants.check_budget(account, stack, scene.log.orders)
    for name in stack.parts:
        logged = first_traceback(stack.log(name))
        account.require(
            "no process met an error that it did not foresee",
            holds=not logged,
            otherwise=f"{name}: {logged}",
        )
    for row in rows:
        end = row["error_code"] or row["state"]
        outcome.ends[end] = outcome.ends.get(end, 0) + 1
    outcome.figures = {
        "results": len(rows),
        "ids received by clients": sum(len(order.ids) for order in scene.log.orders),
        "most attempts of one result": max((row["attempt"] for row in rows), default=0),
        "results that needed more than one": sum(row["attempt"] > 1 for row in rows),
        "vectors and scores that needed more than one": sum(
            row["attempt"] > 1 and row["vector"] is not None for row in rows
        ),
        "texts of images that needed more than one": sum(
            row["attempt"] > 1 and '"images"' in row["parameters"] for row in rows
        ),
        "results that reuse answered": sum(row["reused_from"] is not None for row in rows),
        "pieces of text that the sweep removed": swept,
        "latest end after a deadline, s": max(
            (
                (row["finished_at"] - row["deadline_at"]).total_seconds()
                for row in rows
                if row["finished_at"] and row["deadline_at"]
            ),
            default=0.0,
        ),
    }


async def _sweep(stack: Stack) -> int:
    """Have the hourly sweep of odd remains now; how many pieces of text it removed.

    A worker that was fenced leaves some where its last write and its results' end crossed.
    """
    count = "SELECT count(*) FROM result_chunks"
    before = (await stack.fetch(count))[0]["count"]
    settings = make_settings(stack.postgres, stack.database)
    async with Database(settings, "chaos") as database:
        for step in cleaning_steps(settings, datetime.now(UTC)):
            while await database.run(step):
                pass
    return int(before - (await stack.fetch(count))[0]["count"])


async def _check_totals(account: Account, stack: Stack) -> None:
    counted = await stack.fetch(
        """SELECT team_id, coalesce(error_code, 'completed') AS ended_as, count(*)::int AS results
           FROM results WHERE state <> 'pending' GROUP BY 1, 2 ORDER BY 1, 2"""
    )
    totals = await stack.fetch(
        """SELECT team_id, ended_as, sum(results)::int AS results FROM minute_stats
           GROUP BY 1, 2 ORDER BY 1, 2"""
    )
    account.look(invariants.COUNTED, sum(row["results"] for row in counted))
    if counted != totals:
        account.accuse(invariants.COUNTED, f"{counted}, counted as {totals}")


async def _check_usage(account: Account, stack: Stack) -> None:
    """The ledger's sums against the rows of results, which it outlives. Reused ones cost no tokens."""
    groups = "GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 3, 4, 5"
    rows = await stack.fetch(
        f"""SELECT team_id, (finished_at AT TIME ZONE 'UTC')::date AS day,
              coalesce(token_id, '') AS token_id, model_name,
              coalesce(error_code, 'completed') AS ended_as, count(*)::int AS results,
              coalesce(sum(prompt_tokens) FILTER (WHERE reused_from IS NULL), 0)::int AS prompt_tokens,
              coalesce(sum(completion_tokens) FILTER (WHERE reused_from IS NULL), 0)::int
                AS completion_tokens
            FROM results WHERE state <> 'pending' {groups}"""
    )
    columns = "team_id, day, token_id, model_name, ended_as"
    sums = "results, prompt_tokens, completion_tokens"
    used = await stack.fetch(
        f"""SELECT {columns}, sum(results)::int AS results, sum(prompt_tokens)::int AS prompt_tokens,
              sum(completion_tokens)::int AS completion_tokens
            FROM (SELECT {columns}, {sums} FROM usage_days
                  UNION ALL SELECT {columns}, {sums} FROM usage_entries) u {groups}"""
    )
    account.look(invariants.USED, sum(row["results"] for row in rows))
    account.require(invariants.USED, holds=rows == used, otherwise=f"{rows}, used {used}")


async def _check_teams(account: Account, stack: Stack, scene: Scene, ledger: Ledger) -> None:
    """Results that each team can list: its own, and none of the other's."""
    chance = random.Random(scene.seed)  # noqa: S311 - not for secrets
    port = stack.ports["api"]
    for team, token in scene.tokens.items():
        headers = {"Authorization": f"Bearer {token}"}
        async with ask(port, "GET", "/results/export", None, headers) as reply:
            listed = {orjson.loads(line)["id"] for line in (await reply.read()).splitlines()}
        own = {result_id for result_id, row in ledger.by_id.items() if row["team_id"] == team}
        account.look(invariants.TEAMS, len(own))
        if listed != own:
            account.accuse(invariants.TEAMS, f"{team} lists {len(listed)} of its {len(own)}")
        others = sorted(ledger.by_id.keys() - own)
        for result_id in chance.sample(others, min(_FOREIGN_READS, len(others))):
            async with ask(port, "GET", f"/results/{result_id}", None, headers) as reply:
                account.require(
                    invariants.TEAMS,
                    holds=reply.status == 404,
                    otherwise=f"{team} reads {result_id}: {reply.status}",
                )
