"""`python -m app up`: everything on this machine, from nothing to a ready line, until Ctrl-C."""

import asyncio
import json
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.cli.up import demo_index, preflight, processes, served_models
from app.cli.up.gpu import Gpu
from app.cli.up.postgres import EmbeddedPostgres
from app.cli.up.processes import StartError
from app.cli.up.progress import Progress
from app.cli.up.served_models import ModelOptions
from app.cli.up.service import ServicePart, migrate
from app.cli.up.supervisor import Supervisor
from app.cli.up.triton import EmbeddedTriton
from app.core.program import IS_PACKAGE, PROGRAM, ROOT
from app.infini_gram.declarations import DeclarationError, read_declarations
from app.provisioning.patterns import is_plain_path

HOST = "127.0.0.1"
# Running results may finish this long after Ctrl-C; then they are handed back to the queue.
GRACE_SECONDS = 10.0
SETTINGS_FILE = "settings.env"  # in the data directory
CPU_VENV = ROOT / ".venv-triton"
GPU_VENV = ROOT / ".venv-triton-gpu"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `up`. `gpu`: vLLM runs on NVIDIA GPUs.

    The web page's port is `ui_port`; None: the next one, or a free one if that is taken.
    `venv` is Triton's environment; None: that of the checkout.
    """

    port: int
    data: Path
    light: bool = False
    gpu: bool = False
    ui_port: int | None = None
    model: ModelOptions = field(default_factory=ModelOptions)
    venv: Path | None = None

    @property
    def triton_venv(self) -> Path:
        return self.venv or (GPU_VENV if self.gpu else CPU_VENV)


@dataclass(frozen=True, slots=True)
class _Ports:
    """Ports of the web page, and of the worker's metrics in a setting's format."""

    ui: int
    metrics: str


async def up(options: UpOptions) -> int:
    stopping = _stop_on_signals()
    async with Progress(sys.stdout) as progress:
        try:
            with preflight.lock(options.data):
                await _run(options, progress, stopping)
        except StartError as error:
            progress.line(f"Cannot start: {error}")
            return 1
    return 0


async def _run(options: UpOptions, progress: Progress, stopping: asyncio.Event) -> None:
    begun = time.monotonic()
    preflight.check(
        port=options.port, data=options.data, venv=options.triton_venv, light=options.light
    )
    try:
        _declared(os.environ)
    except DeclarationError as error:
        raise StartError(f"LLM_INDEXES_FILE: {error}") from error
    gpus = await asyncio.to_thread(preflight.find_gpus, options.triton_venv) if options.gpu else []
    for gpu in gpus:
        progress.line(f"  GPU {gpu.name}, {gpu.memory / 2**30:.0f} GiB")
    processes.become_reaper()
    supervisor = Supervisor(progress)
    ports = _Ports(
        ui=preflight.choose_ui_port(options.port, options.ui_port),
        metrics=os.environ.get("LLM_METRICS_PORT") or str(processes.free_port()),
    )
    stop = asyncio.create_task(stopping.wait())
    start = asyncio.create_task(_start(options, ports, gpus, supervisor, progress))
    try:
        await asyncio.wait({start, stop}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            served, indexes = start.result()
            progress.line(_ready_text(options, ports, served, indexes, time.monotonic() - begun))
            keep = asyncio.create_task(supervisor.wait())
            await asyncio.wait({keep, stop}, return_when=asyncio.FIRST_COMPLETED)
            if keep.done():
                keep.result()
    finally:
        stop.cancel()
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        await supervisor.stop()


async def _start(
    options: UpOptions,
    ports: _Ports,
    gpus: Sequence[Gpu],
    supervisor: Supervisor,
    progress: Progress,
) -> tuple[list[str], list[str]]:
    """Start all parts, the model parallel to the API and the worker; return the names of models and indexes."""
    data = options.data.absolute()
    logs = data / "logs"
    served = await served_models.prepare(
        options.model, data, progress, light=options.light, gpus=gpus
    )
    postgres = EmbeddedPostgres(data / "postgres", logs / "postgres.log")
    triton = EmbeddedTriton(options.triton_venv, data / "triton", served, logs / "triton.log")

    async def start_attribution(name: str, environment: Mapping[str, str], grace: float) -> None:
        command = f"worker --kind attribution --index {name}"
        log_file = logs / f"attribution-{name}.log"
        try:
            part = ServicePart(f"Attribution {name}", command, environment, log_file, grace)
            await supervisor.start(part)
        except StartError as error:  # such as a broken index: the other parts do not need it
            progress.line(f"  {error}")

    async def start_service() -> list[str]:
        indexes = asyncio.create_task(_prepare_indexes(options, progress))
        try:
            await supervisor.start(postgres)
            environment = _environment(options, {**postgres.environment, **triton.environment})
            async with progress.step("Schema", done="is up to date"):
                await migrate(environment, logs / "migrate.log")
            environment |= {**local_profile(options), **await indexes}
        finally:
            indexes.cancel()
            await asyncio.gather(indexes, return_exceptions=True)
        _write_settings(data / SETTINGS_FILE, environment)
        grace = float(environment["LLM_SHUTDOWN_GRACE_SECONDS"]) + 5
        ready = f"{_url(options)}/health/ready"
        worker_environment = environment | {"LLM_METRICS_PORT": ports.metrics}
        names = _declared(environment)
        await _gather(
            supervisor.start(
                ServicePart("API", "serve", environment, logs / "api.log", grace, ready)
            ),
            supervisor.start(
                ServicePart("Worker", "worker", worker_environment, logs / "worker.log", grace)
            ),
            supervisor.start(_web_page(options, ports.ui, logs)),
            *(start_attribution(name, environment, grace) for name in names),
        )
        return names

    # The API accepts work before the model is loaded.
    _, indexes = await _gather(supervisor.start(triton), start_service())
    return list(served), indexes


async def _prepare_indexes(options: UpOptions, progress: Progress) -> Mapping[str, str]:
    """Settings of the demo index, unless LLM_INDEXES_FILE names a file of indexes (or is empty)."""
    if options.model.source is not None or "LLM_INDEXES_FILE" in os.environ:
        return {}
    file = await demo_index.prepare(options.data.absolute(), progress)
    return {"LLM_INDEXES_FILE": str(file)} if file else {}


def local_profile(options: UpOptions) -> dict[str, str]:
    """A profile that launches servers on this machine, unless LLM_PROFILES_FILE names others."""
    data = options.data.absolute()
    roots = [ROOT / "models", ROOT / "triton" / "models", data / "weights"]
    paths = [data, options.triton_venv.absolute(), *roots]
    if "LLM_PROFILES_FILE" in os.environ or not all(is_plain_path(str(path)) for path in paths):
        return {}
    file = data / "profiles.toml"
    file.write_text(
        "# Written at each start; to launch elsewhere, set LLM_PROFILES_FILE (docs/launches.md).\n"
        "[profiles.local]\n"
        'provider = "local"\nruntime = "embedded"\ntriton_entries = true\n'
        f'home = "{data}"\ncache = "{data / "weights"}"\n'
        f'venv = "{options.triton_venv.absolute()}"\ntriton = "{ROOT / "triton"}"\n'
        f"model_roots = {json.dumps([str(root) for root in roots])}\n"
        + ('[[profiles.local.tiers]]\nname = "default"\ngpus = 1\n' if options.gpu else "")
    )
    return {"LLM_PROFILES_FILE": str(file)}


def _declared(environment: Mapping[str, str]) -> list[str]:
    file = environment.get("LLM_INDEXES_FILE")
    return [one.name for one in read_declarations(Path(file) if file else None)]


def _web_page(options: UpOptions, port: int, logs: Path) -> ServicePart:
    """The web page, which gets no database settings: it only calls the API."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("LLM_DATABASE")
    }
    environment |= {"LLM_UI_HOST": HOST, "LLM_UI_PORT": str(port), "LLM_UI_API_URL": _url(options)}
    ready = f"http://{HOST}:{port}/ready"
    return ServicePart("Web page", "ui", environment, logs / "ui.log", 5, ready)


async def _gather(*starts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Run them in parallel; the first error cancels the others and is raised unchanged."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(start) for start in starts]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _environment(options: UpOptions, parts: Mapping[str, str]) -> dict[str, str]:
    return {
        "LLM_SHUTDOWN_GRACE_SECONDS": str(GRACE_SECONDS),
        **os.environ,
        **parts,
        "LLM_HOST": HOST,
        "LLM_PORT": str(options.port),
        "LLM_METRICS_PORT": "",  # only one process can have it: the worker
    }


def _write_settings(file: Path, environment: Mapping[str, str]) -> None:
    """Write the generated settings for a shell: other commands need them while the service runs.

    The file has the password of PostgreSQL on loopback: only its owner can read it.
    """
    lines = [
        f"export {name}={shlex.quote(value)}\n"
        for name, value in sorted(environment.items())
        if os.environ.get(name) != value
    ]
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as written:
        written.writelines(lines)


def _url(options: UpOptions) -> str:
    return f"http://{HOST}:{options.port}"


def _ready_text(
    options: UpOptions, ports: _Ports, models: list[str], indexes: list[str], seconds: float
) -> str:
    url = _url(options)
    body = f'{{"model": "{models[0]}", "content": "def ", "parameters": {{"max_tokens": 40}}}}'
    lines = [
        f"\nReady in {seconds:.1f} s. Model: {', '.join(models)}",
        f"  Page   http://{HOST}:{ports.ui}",
        f"  API    {url}",
        f"  Docs   {url}/docs",
        f"  Metrics  {url}/metrics   worker: http://{HOST}:{ports.metrics}/metrics",
        f"  Data   {options.data}   Logs  {options.data / 'logs'}",
        f"  CLI    . {shlex.quote(str(options.data / SETTINGS_FILE))} && {_program()} --help",
        f"  Try    {_curl(f'{url}/results/', body, '-H', 'Prefer: wait=30')}",
    ]
    if indexes:
        count = _curl(f"{url}/{indexes[0]}/count", '{"query": "the"}')
        lines += [f"  Index  {', '.join(indexes)}", f"  Try    {count}"]
    return "\n".join([*lines, "Ctrl-C stops everything; the data stays.\n"])


def _program() -> str:
    """The program's name, as a shell finds it."""
    if not IS_PACKAGE:
        return f".venv/bin/{PROGRAM}"
    return PROGRAM if shutil.which(PROGRAM) else str(Path(sys.executable).with_name(PROGRAM))


def _curl(url: str, body: str, *more: str) -> str:
    return shlex.join(
        ["curl", "-s", url, "-H", "Content-Type: application/json", *more, "-d", body]
    )


def _stop_on_signals() -> asyncio.Event:
    """An event that the first signal sets; a second one kills everything at once."""
    stopping = asyncio.Event()

    def handle() -> None:
        if stopping.is_set():
            processes.kill(processes.descendants(os.getpid()))
            os._exit(130)
        stopping.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, handle)
    return stopping
