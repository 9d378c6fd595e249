"""A whole service on servers that fail, a crowd of clients, and the time after: the run itself."""

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from app.cli.up import service
from app.cli.up.postgres import DATABASE, HOST, EmbeddedPostgres
from tests.chaos.replication import address
from tests.chaos.stack import (
    MortalTriton,
    Part,
    Stack,
    kept_running,
    open_stack,
    until,
)
from tests.chaos.storm.audit import draw_up
from tests.chaos.storm.client import Scene
from tests.chaos.storm.clients import send
from tests.chaos.storm.fault_proxy import FaultProxy
from tests.chaos.storm.faults import Fault, Saboteur, plan
from tests.chaos.storm.invariants import Account
from tests.chaos.storm.jobs import use_up
from tests.chaos.storm.orders import SCORED, SPENT, TEAMS, VLLM
from tests.chaos.storm.outcome import Options, Outcome
from tests.chaos.storm.replicated import ReplicatedPostgres
from tests.conftest import ROOT, SCRIPTED, TRITON_SECRET, TRITON_VENV
from tests.integration.webhook_receiver import receiving
from tests.nvidia_like import nvidia_like
from tests.pooling_models import pooling_entries

VLLM_MODELS = {VLLM: ROOT / "models" / "demo"}
SETTINGS = {
    "LLM_AUTH": "on",
    "LLM_WEBHOOK_ALLOW_PRIVATE": "true",
    "LLM_WORKER_SLOTS": "64",
    # A storm kills what runs more often than anything else would: none of it is the request's fault.
    "LLM_MAX_ATTEMPTS": "100",
}
_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}> {% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
_PROGRESS_SECONDS = 10.0
_PATIENCE_SECONDS = 120.0  # for what is under way when the storm is over
_LAST_SECONDS = 60.0  # for clients that were stopped
_TRITONS = 2
_VLLM = "Triton with vLLM"
_NVIDIA = "Triton like NVIDIA"
_TO_POSTGRES = " - PostgreSQL"


async def run(directory: Path, options: Options, log: Callable[[str], None]) -> Outcome:
    """Raise the service, have the storm over it, and draw up the account."""
    async with (
        _servers(directory, options) as (postgres, tritons),
        receiving() as receiver,
        _house(directory, postgres, tritons) as (stack, proxies, keepers),
        postgres.replicated(lambda primary: _move(stack, proxies, primary)),
    ):
        tokens = await _make_tokens(stack)
        ports = [proxy.port for name, proxy in proxies.items() if name.startswith("client")]
        scene = Scene(options.seed, ports, tokens, receiver.url, options.with_vllm)
        await use_up(stack, scene)
        saboteur = _saboteur(stack, postgres, tritons, proxies)
        faults = plan(options.seed, options.seconds, saboteur.parts, options.pause)
        log(f"{len(faults)} failures in {options.seconds:.0f} s; seed {options.seed}")
        async with keepers:
            await _storm(scene, saboteur, faults, options, log)
            log("The storm is over: waiting for what is under way.")
            await _calm(stack)
            outcome = Outcome(options, saboteur.done, saboteur.failed, scene, Account())
            await draw_up(outcome, stack, receiver)
    return outcome


async def _move(stack: Stack, proxies: Mapping[str, FaultProxy], primary: EmbeddedPostgres) -> None:
    """Direct everyone to a new primary, as an address that moves does."""
    stack.postgres = address(primary)
    for name, proxy in proxies.items():
        if name.endswith(_TO_POSTGRES):
            await proxy.lead_to(HOST, primary.port)


@contextlib.asynccontextmanager
async def _servers(
    directory: Path, options: Options
) -> AsyncIterator[tuple[ReplicatedPostgres, dict[str, MortalTriton]]]:
    """A durable PostgreSQL and three tritonservers, or four; each with the models of its name.

    The third one fails as NVIDIA's vLLM backend does.
    """
    postgres = ReplicatedPostgres(directory)
    models = _scripted_models(directory)
    names = {f"Triton {number}": models for number in range(1, _TRITONS + 1)}
    names |= {_NVIDIA: nvidia_like(directory / "nvidia_models", "scripted")}
    names |= {_VLLM: VLLM_MODELS} if options.with_vllm else {}
    tritons = {}
    for name, models in names.items():
        work = directory / name.lower().replace(" ", "_")
        tritons[name] = MortalTriton(TRITON_VENV, work, models, work.with_suffix(".log"))
        tritons[name].secret = TRITON_SECRET
    servers: list[ReplicatedPostgres | MortalTriton] = [postgres, *tritons.values()]
    try:
        await asyncio.gather(*(server.start() for server in servers))
        yield postgres, tritons
    finally:
        await asyncio.gather(*(server.stop() for server in servers))


@contextlib.asynccontextmanager
async def _house(
    directory: Path, postgres: ReplicatedPostgres, tritons: Mapping[str, MortalTriton]
) -> AsyncIterator[tuple[Stack, dict[str, FaultProxy], contextlib.AsyncExitStack]]:
    """Two APIs, one of them a worker too, and two workers, behind networks that can fail."""
    names = ("api", "api 2", "alice", "bob")
    server = address(postgres.primary)
    async with contextlib.AsyncExitStack() as open_ones:
        proxies = {
            f"{name}{_TO_POSTGRES}": FaultProxy(name, HOST, server.port, resets_when_healed=False)
            for name in names
        }
        for name, triton in tritons.items():
            host, _, port = triton.address("grpc").partition(":")
            # Triton allows a ping in five minutes, so a silent one could go unseen for as long.
            proxies[f"service - {name}"] = FaultProxy(
                name, host, int(port), resets_when_healed=True
            )
        for proxy in proxies.values():
            await open_ones.enter_async_context(proxy.run())

        def behind(name: str) -> dict[str, str]:
            return {"LLM_DATABASE_URL": f"{HOST}:{proxies[f'{name}{_TO_POSTGRES}'].port}"}

        services = [proxy for name, proxy in proxies.items() if name.startswith("service")]
        tritons_for_all = ",".join(f"{HOST}:{proxy.port}" for proxy in services)
        changes = SETTINGS | {
            "TRITON_GRPC_SERVICE": tritons_for_all,
            "LLM_MODEL_REPOSITORY": str(_make_repository(directory)),
        }
        first = next(iter(tritons.values()))
        environment = os.environ | postgres.primary.environment | first.environment
        await service.migrate(environment, directory / "migrate.log")
        stack = await open_ones.enter_async_context(
            open_stack(directory, server, DATABASE, first, **changes | behind("api"))
        )
        await stack.start_api("api 2", "serve --with-worker", **behind("api 2"))
        for name in ("alice", "bob"):
            await stack.start_worker(name, **behind(name))
        for name in ("api", "api 2"):
            proxy = FaultProxy(name, HOST, stack.ports[name], resets_when_healed=True)
            proxies[f"client - {name}"] = proxy
            await open_ones.enter_async_context(proxy.run())
        keepers = contextlib.AsyncExitStack()
        parts: list[Part] = [postgres, *tritons.values(), *stack.parts.values()]
        for part in parts:
            await keepers.enter_async_context(kept_running(part))
        yield stack, proxies, keepers


def _scripted_models(directory: Path) -> dict[str, Path]:
    """The model that writes, also by a name that only servers have that score prompts; vectors and scores."""
    return SCRIPTED | {SCORED: SCRIPTED["scripted"]} | pooling_entries(directory / "pooling")


def _make_repository(directory: Path) -> Path:
    """The directory from which the service reads the chat templates of all models.

    The scripted model takes images.
    """
    repository = directory / "repository"
    version = repository / "scripted" / "1"
    version.mkdir(parents=True)
    (version / "model.json").symlink_to(SCRIPTED["scripted"] / "1" / "model.json")
    (version / "config.json").write_text('{"architectures": [], "vision_config": {}}')
    (version / "chat_template.jinja").write_text(_TEMPLATE)
    (repository / SCORED).symlink_to(SCRIPTED["scripted"])
    for name, model in VLLM_MODELS.items():
        (repository / name).symlink_to(model)
    pooling_entries(repository)
    return repository


async def _make_tokens(stack: Stack) -> dict[str, str]:
    """An API key for each team, as operators make them."""
    tokens = {}
    for team in (*TEAMS, SPENT):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app", "token", "create", "--team", team,
            env=stack.environment, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        output, _ = await process.communicate()
        assert process.returncode == 0
        tokens[team] = output.decode().split()[-1]
    return tokens


def _saboteur(
    stack: Stack,
    postgres: ReplicatedPostgres,
    tritons: Mapping[str, MortalTriton],
    proxies: dict[str, FaultProxy],
) -> Saboteur:
    return Saboteur(
        {name: lambda name=name: stack.parts[name] for name in stack.parts},  # type: ignore[misc]
        {name: triton for name, triton in tritons.items() if name not in (_VLLM, _NVIDIA)},
        {name: triton for name, triton in tritons.items() if name == _VLLM},
        {name: triton for name, triton in tritons.items() if name == _NVIDIA},
        postgres,
        proxies,
    )


async def _storm(
    scene: Scene,
    saboteur: Saboteur,
    faults: list[Fault],
    options: Options,
    log: Callable[[str], None],
) -> None:
    """Clients and failures, until both are over."""
    crowd = asyncio.create_task(send(scene, options.crowd))
    logging_task = asyncio.create_task(_log_progress(scene, log))
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(saboteur.carry_out(faults, log))
            group.create_task(asyncio.sleep(options.seconds))  # the storm's duration
        scene.is_over = True
        await asyncio.wait([crowd], timeout=_PATIENCE_SECONDS)
        scene.gives_up = True
        await asyncio.wait([crowd], timeout=_LAST_SECONDS)
    finally:
        logging_task.cancel()
        crowd.cancel()
        ends = await asyncio.gather(crowd, logging_task, return_exceptions=True)
    if isinstance(ends[0], Exception):
        raise ends[0]


async def _log_progress(scene: Scene, log: Callable[[str], None]) -> None:
    began = asyncio.get_running_loop().time()
    while True:
        await asyncio.sleep(_PROGRESS_SECONDS)
        orders = scene.log.orders
        passed = asyncio.get_running_loop().time() - began
        faulty = sum(bool(order.faults) for order in orders)
        wrong = f", {faulty} WRONG" if faulty else ""
        log(f"{passed:6.1f} s  {len(orders):,} orders, {scene.under_way} under way{wrong}")


async def _calm(stack: Stack) -> None:
    """Until everything has ended, is counted, and was called about; or has had time enough."""
    for condition in (
        "SELECT FROM results WHERE state = 'pending' LIMIT 1",
        "SELECT FROM undigested_results LIMIT 1",
        "SELECT FROM job_events LIMIT 1",
        "SELECT FROM jobs WHERE ended_at IS NULL OR deleted_at IS NOT NULL LIMIT 1",
        "SELECT FROM webhook_deliveries WHERE state = 'pending' LIMIT 1",
    ):

        async def is_met(condition: str = condition) -> bool:
            return not await stack.fetch(condition)

        with contextlib.suppress(AssertionError):  # the account reports it
            await until(is_met, _PATIENCE_SECONDS, condition)
