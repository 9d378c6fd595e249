"""Clocks that jump: of the hosts of API and worker, and of the database."""

import asyncio
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

from app.cli.up.triton import EmbeddedTriton
from app.core.ids import created_at
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import LEASE_SECONDS, SPEAKING, Stack, ask_directly, check_completed

DAY = 86_400.0

# Python imports it at the start of a process: the host's clock is then ahead by the number in a file.
# Except for grpc, which passes its deadlines to C: there the clock has not jumped.
_SHIM = """
import os, sys, time

def _shift(clock, unit):
    def shifted():
        if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc."):
            return clock()
        with open(os.environ["CLOCK_AHEAD"]) as file:
            return clock() + unit(float(file.read() or 0))
    return shifted

time.time = _shift(time.time, float)
time.time_ns = _shift(time.time_ns, lambda seconds: int(seconds * 10**9))
"""

# Found before PostgreSQL's own by sessions with this path.
_SHIFT_DATABASE = (
    "CREATE SCHEMA clock",
    "CREATE TABLE clock.ahead AS SELECT interval '0' AS ahead",
    """CREATE FUNCTION clock.now() RETURNS timestamptz STABLE LANGUAGE sql
       AS 'SELECT pg_catalog.now() + ahead FROM clock.ahead'""",
    """CREATE FUNCTION clock.clock_timestamp() RETURNS timestamptz VOLATILE LANGUAGE sql
       AS 'SELECT pg_catalog.clock_timestamp() + ahead FROM clock.ahead'""",
    """DO $$ BEGIN
         EXECUTE format('ALTER DATABASE %I SET search_path = clock, public, pg_catalog',
                        current_database());
       END $$""",
)


def prompts_of(what: str, count: int, seconds: float = 2 * LEASE_SECONDS) -> list[str]:
    """Prompts whose results take so long."""
    delay = seconds * 1000 / 12
    return [f"{what} {number} {{{{chunks=12 delay_ms={delay}}}}}" for number in range(count)]


async def test_the_hosts_clock_jumps_a_day_ahead_and_back(
    stack: Stack, triton: EmbeddedTriton, tmp_path: Path
) -> None:
    """Running results go on, and nothing is rescued, expired or listed twice."""
    ahead = tmp_path / "ahead"
    ahead.write_text("0")
    (tmp_path / "sitecustomize.py").write_text(_SHIM)
    shim = {"PYTHONPATH": str(tmp_path), "CLOCK_AHEAD": str(ahead)}
    await stack.restart_api(**shim)
    await stack.start_worker("alice", **shim)

    accepted: dict[str, str] = {}
    sent: dict[float, list[str]] = {}
    for jump in (0.0, DAY, 0.0, -DAY):
        # In one write: it is read at any moment.
        (tmp_path / "next").write_text(str(jump))
        (tmp_path / "next").replace(ahead)
        new = await stack.send(prompts_of(f"At {len(accepted)}, {jump} s ahead", 20))
        sent.setdefault(jump, []).extend(new)
        accepted |= new
        await stack.until(SPEAKING, 10, 60)
    await stack.until_terminal(90)

    await check_completed(stack, accepted, await ask_directly(triton, list(accepted.values())))
    assert await stack.count("attempt = 1 AND lost_attempts = 0") == len(accepted)
    assert "fenced" not in stack.log("alice")
    for jump, ids in sent.items():
        for one in ids:
            made = created_at(UUID(one)) - timedelta(seconds=jump)
            assert UUID(one).version == 7
            assert abs(made - datetime.now(UTC)) < timedelta(hours=1), (jump, made)
    assert sorted(await list_all(stack)) == sorted(accepted)
    await check_history(stack)
    check_logs(stack)


async def list_all(stack: Stack) -> list[str]:
    """The ids of all pages of the list."""
    ids: list[str] = []
    page = (await stack.client.get("/results/?limit=7")).json
    while page:
        ids += [item["id"] for item in page]
        page = (await stack.client.get(f"/results/?limit=7&after={ids[-1]}")).json
    return ids


async def test_the_databases_clock_jumps_hours_ahead_and_back(
    stack: Stack, triton: EmbeddedTriton
) -> None:
    """Ahead, all leases look over, and are not; back, those of the dead look as if they were not."""
    for statement in _SHIFT_DATABASE:
        await stack.fetch(statement)
    await stack.restart_api()  # a new search path is for new connections
    worker = await stack.start_worker("alice")
    first = await stack.send(prompts_of("Ahead", 20, LEASE_SECONDS + 8))
    await stack.until(SPEAKING, len(first), 60)
    await asyncio.sleep(LEASE_SECONDS)  # the API judges leases now
    for _ in range(4):
        await stack.fetch("UPDATE clock.ahead SET ahead = ahead + interval '1 hour'")
        # Renewals are so far apart that a judge may well come before them.
        await asyncio.sleep(LEASE_SECONDS / 5)
    await stack.until_terminal(60)
    assert await stack.count("attempt = 1 AND state = 'completed'") == len(first)
    assert not await stack.fetch("SELECT FROM workers WHERE dead_at IS NOT NULL")
    await check_history(stack)

    second = await stack.send(prompts_of("Back", 20, 10))
    await stack.until(SPEAKING, len(second), 60)
    worker.send_signal(signal.SIGKILL)
    await stack.fetch("UPDATE clock.ahead SET ahead = '0'")
    await stack.start_worker("bob")
    await stack.until_terminal(60)
    assert await stack.count("lost_attempts = 1 AND attempt = 2") == len(second)
    accepted = first | second
    await check_completed(stack, accepted, await ask_directly(triton, list(accepted.values())))
    check_logs(stack)
