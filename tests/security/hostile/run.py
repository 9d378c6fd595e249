"""A hostile team's attacks beside a polite team's requests: the run itself, and its account."""

import asyncio
import contextlib
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import orjson
import psutil

from app.auth.token_store import TokenStore
from app.cli.up.triton import EmbeddedTriton
from app.core.database import Database
from tests.chaos.stack import Stack, open_stack
from tests.conftest import ROOT, SCRIPTED, make_settings
from tests.indexes import DEMO_TOKENIZER
from tests.integration.support import until
from tests.integration.webhook_receiver import receiving, silence
from tests.pooling_models import pooling_entries
from tests.postgres import PostgresServer
from tests.security.hostile.attack_process import ATTACKS, SHARES
from tests.security.hostile.attacker import MODEL, Account, Order
from tests.security.hostile.memory_limit import limited, resident_bytes
from tests.security.hostile.polite import Polite, Times

HOSTILE, POLITE = "hostile", "polite"
_CLIENTS = 4  # of the polite team
# The defaults of a deployment, where the stack of the chaos tests has shorter ones.
_SETTINGS = {
    "LLM_AUTH": "on",
    "LLM_WEBHOOK_ALLOW_PRIVATE": "true",
    "LLM_WORKER_SLOTS": "256",
    "LLM_LEASE_SECONDS": "15",
    "LLM_POLL_SECONDS": "1",
    "LLM_FLUSH_SECONDS": "0.5",
    "LLM_TRITON_REFRESH_SECONDS": "2",
    # A team can fill it in a minute: half of it may be its own.
    "LLM_MAX_QUEUED": "20000",
    # As docs/limits.md advises for teams that do not trust each other.
    "LLM_TEAM_MAX_RUNNING": "128",
}
_APIS = ("api", "other")
_MAX_UNCOUNTED_SECONDS = (
    20.0  # from the end of a result of the polite team to its place in the totals
)
# Seconds that the longest of them has waited. Places above 0: see `app/results/word_indexer.py`.
_UNCOUNTED = """
SELECT coalesce(extract(epoch FROM clock_timestamp() - min(r.finished_at)), 0)::float8 AS seconds
FROM undigested_results u JOIN results r ON r.id = u.result_id WHERE u.place > 0 AND r.team_id = $1
"""

_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass(frozen=True)
class Options:
    """`scale`: of the largest requests; 1 is the most that the service accepts."""

    seed: str
    alone_seconds: float
    seconds: float
    attackers: int
    scale: float
    streams: int
    memory_bytes: int | None = None  # of the API, and of the worker
    settings: Mapping[str, str] = field(default_factory=dict)  # further ones, by variable
    attacks: Sequence[str] = ATTACKS
    requests: int = 0  # of the polite team beside the hostile one, at least: it lasts until then


@dataclass
class Outcome:
    options: Options
    alone: Times = field(default_factory=Times)
    beside: Times = field(default_factory=Times)
    beside_one: Times = field(default_factory=Times)  # with one API process
    beside_suspects: Times = field(default_factory=Times)
    uncounted_seconds: float = 0.0  # longest of a polite result, until the totals have it
    polite: list[str] = field(default_factory=list)  # faults
    lost: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # processes
    account: Account = field(default_factory=Account)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    limits: dict[str, str] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        found = [*self.polite, *self.lost, *self.ended, *self.account.faults]
        if self.uncounted_seconds > _MAX_UNCOUNTED_SECONDS:
            found.append(f"a polite result was counted after {self.uncounted_seconds:.0f} s")
        return found


async def run(
    directory: Path,
    postgres: PostgresServer,
    database: str,
    triton: EmbeddedTriton,
    options: Options,
    log: Callable[[str], None] = lambda _: None,
) -> Outcome:
    """Measure the polite team alone, beside the hostile one, with one API process, and beside suspects."""
    outcome = Outcome(options)
    keys = await _make_keys(postgres, database)
    settings = _SETTINGS | {"LLM_MODEL_REPOSITORY": str(_make_repository(directory))}
    settings |= options.settings
    async with (
        receiving() as silent,
        open_stack(directory, postgres, database, triton, **settings) as stack,
    ):
        silent.respond = silence
        await stack.start_api(_APIS[1])
        await stack.start_worker("alice")
        canary = secrets.token_hex(8)
        ports = [stack.ports[name] for name in _APIS]
        polite = Polite(ports, keys[POLITE], canary, b"hostile ")
        order = Order(
            options.attacks, options.seed, options.attackers, options.scale, options.streams, ports,
            keys[HOSTILE], silent.url, canary, polite.ids,
        )  # fmt: skip
        with _watched(stack, outcome):
            async with _sending(polite):
                await asyncio.sleep(options.alone_seconds)  # the duration that is measured
            outcome.alone, polite.times = polite.times, Times()
            log(f"alone: {outcome.alone}")
            async with (
                _sending(polite),
                _counted(stack, outcome),
                _attacking(order, outcome.account),
            ):
                await asyncio.sleep(options.seconds)  # the attack's duration
                await until(
                    lambda: asyncio.sleep(0, len(polite.times.whole) >= options.requests), 200
                )
            outcome.beside, polite.times = polite.times, Times()
            log(f"beside, two API processes: {outcome.beside}")
            polite.ports = order.ports[:1]
            order = replace(order, ports=polite.ports, seed=f"{options.seed} one")
            async with _sending(polite), _attacking(order, outcome.account):
                await asyncio.sleep(options.alone_seconds)  # the attack's duration
            outcome.beside_one, polite.times, polite.ports = polite.times, Times(), ports
            order = replace(order, attacks=SHARES, attackers=1, ports=ports)
            async with _sending(polite), _attacking(order, outcome.account):
                await asyncio.sleep(options.alone_seconds)  # the attack's duration
            outcome.beside_suspects, outcome.polite = polite.times, polite.faults
        outcome.lost = await _lost(stack, polite.ids)
    return outcome


def _make_repository(directory: Path) -> Path:
    """The scripted model with a tokenizer, so that prompts are counted and `/tokenize` responds.

    It takes images.
    """
    model = directory / "repository" / MODEL / "1"
    model.mkdir(parents=True)
    for file in (SCRIPTED[MODEL] / "1" / "model.json", DEMO_TOKENIZER):
        (model / file.name).symlink_to(file)
    (model / "config.json").write_text('{"architectures": [], "vision_config": {}}')
    (model / "chat_template.jinja").write_text(_TEMPLATE)
    pooling_entries(directory / "repository")
    return directory / "repository"


async def _make_keys(postgres: PostgresServer, database: str) -> dict[str, str]:
    settings = make_settings(postgres, database)
    async with Database(settings, "test") as connections:
        store = TokenStore(connections, settings)
        return {team: (await store.create(team)).text for team in (HOSTILE, POLITE)}


@contextlib.contextmanager
def _watched(stack: Stack, outcome: Outcome) -> Iterator[None]:
    """Limit the memory of API and worker, and record their peaks and ends."""
    processes = {name: psutil.Process(part.pid) for name, part in stack.parts.items()}
    with contextlib.ExitStack() as limits:
        if outcome.options.memory_bytes is not None:
            for name, process in processes.items():
                limit = limited(f"hostile-{name}", process.pid, outcome.options.memory_bytes)
                outcome.limits[name] = limits.enter_context(limit)
        yield
        for name, process in processes.items():
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                outcome.ended.append(f"{name} ended: {stack.log(name)[-2000:]}")
            else:
                outcome.peak_bytes[name] = resident_bytes(process.pid)


@contextlib.asynccontextmanager
async def _sending(polite: Polite) -> AsyncIterator[None]:
    polite.is_over = False
    clients = asyncio.create_task(polite.send(_CLIENTS))
    yield
    polite.is_over = True
    await clients


@contextlib.asynccontextmanager
async def _counted(stack: Stack, outcome: Outcome) -> AsyncIterator[None]:
    """Look again and again for how long the polite team's results wait for their place in the totals."""

    async def look() -> None:
        while True:
            (row,) = await stack.fetch(_UNCOUNTED, POLITE)
            outcome.uncounted_seconds = max(outcome.uncounted_seconds, row["seconds"])
            await asyncio.sleep(1)  # between two looks

    looking = asyncio.create_task(look())
    yield
    looking.cancel()
    for end in await asyncio.gather(looking, return_exceptions=True):
        if isinstance(end, Exception):
            raise end


@contextlib.asynccontextmanager
async def _attacking(order: Order, account: Account) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.security.hostile.attack_process", cwd=ROOT,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin
    process.stdin.write(orjson.dumps(asdict(order)) + b"\n")
    try:
        yield
    finally:
        process.stdin.close()
        output, _ = await process.communicate()
    account.add(Account(**orjson.loads(output)))


async def _lost(stack: Stack, ids: list[str]) -> list[str]:
    rows = await stack.fetch(
        "SELECT id::text, state, team_id FROM results WHERE id = ANY($1::uuid[])", ids
    )
    states = {row["id"]: (row["state"], row["team_id"]) for row in rows}
    return [f"{one}: {states.get(one)}" for one in ids if states.get(one) != ("completed", POLITE)]
