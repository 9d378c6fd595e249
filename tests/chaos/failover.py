"""A PostgreSQL failover, shown: kill -9 of the primary under load, promotion, nothing lost.

`make failover`, or `python -m tests.chaos.failover`; `test_failover.py` does the same with less.
See docs/failover.md.
"""

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

from app.cli.up.postgres import DATABASE
from app.cli.up.triton import EmbeddedTriton
from tests.chaos.history import check_history, check_logs
from tests.chaos.replication import Pair, address, open_pair
from tests.chaos.stack import PARAMETERS, Stack, ask_directly, open_stack
from tests.conftest import SCRIPTED, TRITON_VENV

Log = Callable[[str], None]

_PAUSE = 0.2  # seconds before a client sends again what was refused
_END_SECONDS = 120.0


@dataclass(frozen=True)
class Plan:
    """Plan of a failover run; times in seconds."""

    results: int
    per_second: float
    promoted_after: float  # the kill: the delay of the tool that watches the servers
    stalls_for: float = 0.0  # before the kill the primary sends nothing to its standby
    is_synchronous: bool = True


@dataclass
class Load:
    """Clients that send each prompt, under a key of its own, until they receive an id."""

    stack: Stack
    accepted: dict[str, str] = field(default_factory=dict)
    told_at: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    async def send(self, prompts: list[str], per_second: float) -> None:
        """Send at a constant rate, independent of the fate of earlier requests."""
        async with asyncio.TaskGroup() as senders:
            for prompt in prompts:
                senders.create_task(self._send(prompt))
                await asyncio.sleep(1 / per_second)  # the rate

    async def until_accepted(self, count: int) -> None:
        """Wait until the clients received this many ids."""
        while len(self.told_at) < count:  # noqa: ASYNC110 - one loop, and nothing to be exact about
            await asyncio.sleep(0.01)

    @property
    def longest_pause(self) -> float:
        """The longest time in seconds between two ids received one after the other."""
        return max(b - a for a, b in zip(self.told_at, self.told_at[1:], strict=False))

    async def _send(self, prompt: str) -> None:
        body = {
            "model": "scripted",
            "content": prompt,
            "parameters": PARAMETERS,
            "idempotency_key": prompt,
        }
        while True:
            with contextlib.suppress(ConnectionError):
                answer = await self.stack.client.post("/results/", body)
                if answer.status == 202:
                    break
                assert answer.status == 503, answer
                self.refused[answer.json["code"]] += 1
            await asyncio.sleep(_PAUSE)
        self.accepted[str(answer.json["id"])] = prompt
        self.told_at.append(time.monotonic())


@dataclass(frozen=True)
class Outcome:
    """Outcome of the results whose ids the clients received."""

    accepted: int
    lost: int  # received by a client, and missing or without its answer
    doubled: int  # stored twice for one key
    run_again: int
    refused: int  # 503
    seconds_without_writes: float
    seconds_to_promote: float


def make_prompts(count: int) -> list[str]:
    """Prompts whose results take two seconds."""
    return [f"Failover {number} {{{{chunks=8 delay_ms=250}}}}" for number in range(count)]


@contextlib.asynccontextmanager
async def open_service(
    directory: Path, triton: EmbeddedTriton, pair: Pair, **changes: str
) -> AsyncIterator[Stack]:
    """An API and two workers that know both servers."""
    servers = {"LLM_DATABASE_URL": pair.addresses, "LLM_LEASE_SECONDS": "15"}
    async with open_stack(
        directory, address(pair.primary), DATABASE, triton, **servers | changes
    ) as stack:
        await stack.start_worker("alice")
        await stack.start_worker("bob")
        yield stack


async def fail_over(
    plan: Plan, directory: Path, triton: EmbeddedTriton, log: Log = lambda _: None
) -> Outcome:
    """Do it all. Raises AssertionError where results break a rule of their history."""
    prompts = make_prompts(plan.results)
    async with open_pair(directory, log) as pair:
        if plan.is_synchronous:
            await pair.make_synchronous()
            log("synchronous_standby_names names the standby: a commit waits for its disk")
        async with open_service(directory, triton, pair) as stack:
            log("API and two workers are ready")
            load = Load(stack)
            sending = asyncio.create_task(load.send(prompts, plan.per_second))
            await load.until_accepted(plan.results // 3)
            promoting = await _replace_primary(plan, pair, load, log)
            stack.postgres = address(pair.standby)
            await sending
            log(f"all is sent: {len(load.accepted)} ids were received")
            await stack.until_terminal(_END_SECONDS)
            log("no result is pending")
            outcome = await _judge(load, await ask_directly(triton, prompts), promoting)
            await check_history(stack)
            check_logs(stack)
    return outcome


async def _replace_primary(plan: Plan, pair: Pair, load: Load, log: Log) -> float:
    """Kill the primary, promote the standby; how long the promotion took."""
    if plan.stalls_for:
        log("the primary's log no longer reaches the standby")
        await pair.stall()
        # Commits meanwhile wait for the standby, or are lost with the primary.
        await asyncio.sleep(plan.stalls_for)
    pair.primary.send_signal(signal.SIGKILL)
    log(f"kill -9 of the primary; {len(load.accepted)} ids were received so far")
    await asyncio.sleep(plan.promoted_after)  # the outage that is planned
    began = time.monotonic()
    await pair.standby.promote()
    took = time.monotonic() - began
    accepted = len(load.accepted)
    log(f"the standby is the primary: pg_promote() took {took:.2f} s")
    await load.until_accepted(accepted + 1)
    log("the first id since then is received")
    return took


async def _judge(load: Load, expected: dict[str, str], promoting: float) -> Outcome:
    stack = load.stack
    rows = await stack.fetch("SELECT id, state, output, attempt FROM results")
    found = {str(row["id"]): row for row in rows}
    good = [
        result_id
        for result_id, prompt in load.accepted.items()
        if (row := found.get(result_id))
        and (row["state"], row["output"]) == ("completed", expected[prompt])
    ]
    keyed = await stack.fetch("SELECT DISTINCT result_id FROM idempotency_keys")
    return Outcome(
        accepted=len(load.accepted),
        lost=len(load.accepted) - len(good),
        doubled=len(rows) - len(keyed),
        run_again=sum(row["attempt"] > 1 for row in rows),
        refused=load.refused.total(),
        seconds_without_writes=load.longest_pause,
        seconds_to_promote=promoting,
    )


def main() -> int:
    """Show it; 0 when nothing was lost or doubled."""
    options = _parse()
    plan = Plan(
        results=options.results,
        per_second=options.per_second,
        promoted_after=options.promoted_after,
        stalls_for=1.0,
        is_synchronous=not options.asynchronous,
    )
    began = time.monotonic()

    def log(text: str) -> None:
        sys.stdout.write(f"{time.monotonic() - began:6.2f} s  {text}\n")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="llm-failover-") as name:
        Path(name).chmod(0o755)  # PostgreSQL may run as another user
        outcome = asyncio.run(_show(plan, Path(name), log))
    sys.stdout.write(_table(outcome))
    return int(outcome.lost > 0 or outcome.doubled > 0)


async def _show(plan: Plan, directory: Path, log: Log) -> Outcome:
    triton = EmbeddedTriton(TRITON_VENV, directory / "triton", SCRIPTED, directory / "triton.log")
    await triton.start()
    try:
        log("Triton is ready, with the scripted model")
        return await fail_over(plan, directory, triton, log)
    finally:
        await triton.stop()


def _table(outcome: Outcome) -> str:
    lines = {
        "ids received": outcome.accepted,
        "lost": outcome.lost,
        "doubled": outcome.doubled,
        "run again": outcome.run_again,
        "answered 503, sent again": outcome.refused,
        "seconds without writes": f"{outcome.seconds_without_writes:.2f}",
        "of these, pg_promote()": f"{outcome.seconds_to_promote:.2f}",
    }
    return "\n" + "".join(f"{name:<26}{value:>8}\n" for name, value in lines.items())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.failover", description=__doc__)
    parser.add_argument("--results", type=int, default=2000, help="how many are sent")
    parser.add_argument("--per-second", type=float, default=100.0, help="how many of them a second")
    parser.add_argument(
        "--promoted-after", type=float, default=3.0, help="seconds from the kill to pg_promote()"
    )
    parser.add_argument(
        "--asynchronous",
        action="store_true",
        help="without synchronous_standby_names: ids received in the last second are lost",
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
