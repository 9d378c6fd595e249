"""The command line: `python -m app COMMAND`. Each command is a process of the service.

A command imports what it runs by itself: the processes stay small and start at once, and a
container needs no package of the embedded servers.
"""

import argparse
import asyncio
import logging
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from app.cli import index_arguments, launch, model_arguments, plan, server, team, token_arguments
from app.cli.arguments import Run, add_command, add_subcommands
from app.cli.doctor import command as doctor
from app.core import logs
from app.core.errors import SchemaMismatchError
from app.core.settings import Settings
from app.core.settings.observability import LogSettings
from app.infini_gram.declarations import DeclarationError, read_declarations
from app.provisioning.profiles import ProfileError, read_profiles

logger = logging.getLogger(__name__)

_SCHEMA_CHECK_TIMEOUT_SECONDS = (
    3.0  # time-out of the check of the database's schema, before a start
)
_ROOT = Path(__file__).resolve().parents[2]
_DESCRIPTION = "Durable results in front of NVIDIA Triton: send a prompt, keep the result."
_EPILOG = """Settings come from the environment; docs/settings.md lists them all. `up` needs none: it
brings its own PostgreSQL and Triton; `plan` needs neither. The other commands need LLM_DATABASE_URL,
LLM_DATABASE_ADMIN_USER, LLM_DATABASE_PASSWORD and LLM_DATABASE_DB, and TRITON_GRPC_SERVICE
where Triton is not on 127.0.0.1:8001."""


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    run: Run = options.run
    try:
        logs.configure(LogSettings())
        return run(options)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"])
            # A message without a location is about several settings, and names them itself.
            place = f"setting {name}" if name else "settings"
            sys.stderr.write(f"{place}: {problem['msg']} (see docs/settings.md)\n")
        return 2
    except DeclarationError as error:
        sys.stderr.write(f"setting LLM_INDEXES_FILE: {error}\n")
        return 2
    except ProfileError as error:
        sys.stderr.write(f"setting LLM_PROFILES_FILE: {error}\n")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m app",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = add_subcommands(parser)

    everything = add_command(
        commands,
        "up",
        "Run everything on this machine: PostgreSQL, Triton, API, worker, web page.",
        _up,
    )
    everything.add_argument("--port", type=int, default=8887, help="port of the API (8887)")
    everything.add_argument(
        "--ui-port", type=int, help="port of the web page (the API's and 1, or any that is free)"
    )
    everything.add_argument(
        "--data", type=Path, default=Path(".data"), help="directory of all data (.data)"
    )
    everything.add_argument(
        "--light", action="store_true", help="the scripted model instead of vLLM: ready in seconds"
    )
    everything.add_argument(
        "--gpu", action="store_true", help="vLLM on the machine's NVIDIA GPU instead of its CPU"
    )
    everything.add_argument("--model", help="Hugging Face id or local directory to serve as well")
    everything.add_argument("--quantization", help="quantization method of --model")
    everything.add_argument("--max-model-len", type=int, help="longest prompt plus output, tokens")
    serve = add_command(commands, "serve", "Run the API.", _serve)
    serve.add_argument(
        "--with-worker", action="store_true", help="run a worker inside the same process"
    )
    add_command(commands, "ui", "Run the web page, a client of the API at LLM_UI_API_URL.", _ui)
    worker = add_command(
        commands,
        "worker",
        "Run a worker: it claims results and runs them, on Triton or on an index.",
        _worker,
    )
    worker.add_argument(
        "--kind",
        choices=("generation", "attribution"),
        default="generation",
        help="kind of its results: generation on Triton (the default), or attribution on an index",
    )
    worker.add_argument("--index", help="the index, for attribution")
    worker.add_argument(
        "--engines",
        type=int,
        choices=range(1, 65),
        metavar="N",
        default=1,
        help="attributions that it runs at the same time, each in its own process (1)",
    )
    add_command(commands, "migrate", "Bring the database's schema up to date.", _migrate)
    for module in (
        *(team, launch, server, token_arguments),
        *(index_arguments, plan, model_arguments, doctor),
    ):
        module.add_to(commands)
    return parser


def _up(options: argparse.Namespace) -> int:
    from app.cli.up.served_models import ModelOptions
    from app.cli.up.up import UpOptions, up

    return asyncio.run(
        up(
            UpOptions(
                port=options.port,
                ui_port=options.ui_port,
                data=options.data,
                light=options.light,
                gpu=options.gpu,
                model=ModelOptions(options.model, options.quantization, options.max_model_len),
            )
        )
    )


def _serve(options: argparse.Namespace) -> int:
    from app.api.startup_checks import check_startup

    settings = _settings()
    exposure = check_startup(settings)
    for line in exposure.warnings:
        logger.warning("%s", line)
    if exposure.refusal:
        sys.stderr.write(f"{exposure.refusal}\n")
        return 2
    for line in exposure.notes:
        logger.info("%s", line)

    if not _schema_fits(settings):
        return 2

    from app.api.app import create_app
    from app.api.server import serve

    app = create_app(settings, with_worker=options.with_worker)
    return serve(app, settings.host, settings.port, settings.trusted_proxies)


def _ui(_: argparse.Namespace) -> int:
    from app.api.server import serve
    from app.ui.main import create_ui
    from app.ui.settings import UiSettings

    settings = UiSettings()
    return serve(create_ui(settings), settings.host, settings.port, settings.trusted_proxies)


def _worker(options: argparse.Namespace) -> int:
    import uvloop

    if options.kind == "generation":
        settings = _settings()
        if not _schema_fits(settings):
            return 2
        uvloop.run(_run_worker(settings))
        return 0

    from app.cli.attribution_worker import run_attribution_worker
    from app.infini_gram.process import AttributionFailedError, EngineDiedError

    if options.index is None:
        sys.stderr.write("worker --kind attribution needs --index NAME: see GET /indexes\n")
        return 2
    settings = _settings()
    if settings.indexes_file is None:
        sys.stderr.write(
            "worker --kind attribution needs LLM_INDEXES_FILE (see docs/infini_gram.md)\n"
        )
        return 2
    if not _schema_fits(settings):
        return 2
    work = run_attribution_worker(settings, settings.indexes_file, options.index, options.engines)
    try:
        uvloop.run(work)
    except (AttributionFailedError, EngineDiedError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except TimeoutError:
        sys.stderr.write(f"index {options.index} could not be opened in time\n")
        return 2
    return 0


def _schema_fits(settings: Settings) -> bool:
    """Check that the database's schema is this version's; if it is not, report it on stderr.

    If the database is unavailable, the process starts, and checks again later (`container`).
    """
    import asyncpg

    from app.core import schema_version
    from app.core.database import Database, is_transient

    async def look() -> None:
        async with (
            asyncio.timeout(_SCHEMA_CHECK_TIMEOUT_SECONDS),
            Database(settings, "llm start") as database,
        ):
            await schema_version.require(database)

    try:
        asyncio.run(look())
    except SchemaMismatchError as error:
        sys.stderr.write(f"{error.detail}\n")
        return False
    except Exception as error:
        if isinstance(error, asyncpg.PostgresError) and not is_transient(error):
            sys.stderr.write(f"The database refused: {error} (see LLM_DATABASE_*)\n")
            return False
        if not is_transient(error):
            raise
    return True


def _settings() -> Settings:
    """The settings, with the files that they name: an error now is better than in the middle of a start."""
    settings = Settings()
    read_declarations(settings.indexes_file)
    read_profiles(settings.profiles_file)
    return settings


async def _run_worker(settings: Settings) -> None:
    from app.api.container import background, new_worker, open_services
    from app.api.openai.batches_router import batch_services
    from app.batches.processor import BatchProcessor
    from app.core import gc_tuning
    from app.core.tracing import tracing

    async with (
        tracing(settings.otlp_endpoint, "llm-worker"),
        open_services(settings, "worker") as services,
    ):
        worker = new_worker(services)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, worker.stop)
        gc_tuning.settle()
        async with background(services, BatchProcessor(batch_services(services))) as tasks:
            running = asyncio.create_task(worker.run(), name="worker")
            done, _ = await asyncio.wait([running, *tasks], return_when=asyncio.FIRST_COMPLETED)
            if running not in done:
                worker.stop()
                await running
            for task in done:
                task.result()


def _migrate(_options: argparse.Namespace) -> int:
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(_ROOT / "db"))
    config.attributes["settings"] = Settings()
    command.upgrade(config, "head")
    return 0
