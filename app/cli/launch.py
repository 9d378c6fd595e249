"""`python -m app launch`: Triton servers by Slurm or on this machine, as by POST /launches."""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from app.api.admin.launches_schemas import launch_to_wire
from app.api.json_codec import validate
from app.cli import launch_download, launch_models
from app.cli.arguments import Run, add_command, add_subcommands
from app.cli.database import store_command
from app.cli.engine_options import ENGINE_OPTION_HELP, engine_option
from app.cli.table import write_table
from app.core.errors import ServiceError
from app.core.ids import new_id
from app.core.settings import Settings
from app.inference.engine_options import engine_options
from app.provisioning.catalogue import read_catalogue
from app.provisioning.job_script import ModelPlace, engine_settings, render_script
from app.provisioning.profiles import Profile, read_profiles
from app.provisioning.spec import LaunchCreate, LaunchSpec, to_spec
from app.provisioning.store import Launch, LaunchStore

_HELP = """Launch Triton servers by the profiles of LLM_PROFILES_FILE, show their states, and stop them.
These commands only write to the database; a running worker starts and stops the servers.
More: docs/launches.md."""

_EPILOG = """examples:
  python -m app launch create qwen Qwen/Qwen2.5-7B-Instruct --dry-run
  python -m app launch create qwen Qwen/Qwen2.5-7B-Instruct --profile della --minutes 240
  python -m app launch create qwen Qwen/Qwen2.5-7B-Instruct \
      --engine-option max_num_seqs=64 --engine-option kv_cache_dtype=fp8
  python -m app launch engine-options cache
  python -m app launch download Qwen/Qwen2.5-7B-Instruct --profile della
  python -m app launch list
  python -m app launch stop 01890000-0000-7000-8000-000000000000"""

# Options of `create` that are members of the request by the same name.
_TEXTS = ("revision", "provider", "profile", "served-name", "tier", "partition", "account",
          "constraint")  # fmt: skip
_NUMBERS = {
    "nodes": "nodes of a server, only of Slurm (1); they are joined by Ray",
    "gpus": "GPUs of each node",
    "cpus": "CPU cores of each node",
    "memory-gb": "host memory of each node",
}

_on_launches = store_command("launch", lambda database, _: LaunchStore(database))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = _HELP, _EPILOG
    actions = add_subcommands(parser)

    def add(name: str, run: Run, text: str) -> argparse.ArgumentParser:
        added = add_command(actions, name, text, run)
        added.add_argument("--team", default="default", help="the launch's team (default)")
        return added

    option = add("create", _create, "Launch a server; prints the launch's id.").add_argument
    option("name", help="the launch's name, and its server's")
    option("model", help="Hugging Face id, or a path below the profile's model roots")
    for name in _TEXTS:
        option(f"--{name}")
    for name, text in _NUMBERS.items():
        option(f"--{name}", type=int, help=text)
    option("--minutes", type=int, help="time limit of the job")
    option("--idle-minutes", type=float, help="stop after this time without use; 0: never")
    option("--engine-option", type=engine_option, action="append", default=[],
           metavar="NAME=VALUE", help=ENGINE_OPTION_HELP)  # fmt: skip
    option("--adapter", type=_adapter, action="append", default=[], metavar="NAME=PLACE",
           help="a LoRA adapter: a directory on the host, or a Hugging Face id; repeat it for several")  # fmt: skip
    option(
        "--dry-run",
        action="store_true",
        help="only print the job's script and the engine's model.json",
    )
    text = "List the engine's options with their types, defaults and choices."
    listing = add_command(actions, "engine-options", text, _engine_options)
    listing.add_argument("text", nargs="?", default="", help="part of a name or of its help")
    launch_models.configure(
        add_command(actions, "models", launch_models.TEXT, launch_models.run, launch_models.EPILOG)
    )
    launch_download.configure(actions)
    add("list", _list, "List launches, the newest first.")
    for name, run, text in (
        ("show", _show, "Show one launch as JSON."),
        ("log", _log, "Print the end of a job's output."),
        ("stop", _stop, "Stop a launch."),
        ("delete", _delete, "Delete a launch that has ended."),
    ):
        add(name, run, text).add_argument("id", type=UUID, help="the launch's id")


def _create(options: argparse.Namespace) -> int:
    settings = Settings()
    profiles = read_profiles(settings.profiles_file)
    try:
        request = validate(LaunchCreate, _request(options))
        spec = to_spec(request, profiles, read_catalogue(settings.catalogue_file))
    except ServiceError as error:
        problems = [f"{one.field}: {one.message}" for one in error.errors] or [error.detail]
        sys.stderr.write("\n".join(problems) + "\n")
        return 2
    profile = profiles[spec.profile]
    if options.dry_run:
        _print_dry_run(spec, profile)
        return 0

    @_on_launches
    async def create(store: LaunchStore, options: argparse.Namespace) -> None:
        launch = await store.create(options.team, profile.provider, spec)
        sys.stdout.write(f"{launch.id}\n")

    return create(options)


def _print_dry_run(spec: LaunchSpec, profile: Profile) -> None:
    """Print the files under headings, as `head` does. An entry of a repository has its own model.json."""
    arguments = json.dumps(engine_settings(spec, ModelPlace()), indent=2)
    files = {"job.sh": render_script(new_id(), spec, profile), "model.json": f"{arguments}\n"}
    sys.stdout.write("\n".join(f"==> {name} <==\n{text}" for name, text in files.items()))


def _request(options: argparse.Namespace) -> dict[str, Any]:
    def given(names: Iterable[str]) -> dict[str, Any]:
        members = {name.replace("-", "_") for name in names}
        return {name: value for name in members if (value := getattr(options, name)) is not None}

    request = {"name": options.name, "model": options.model} | given((*_TEXTS, "idle-minutes"))
    if options.minutes is not None:
        request["time_limit_minutes"] = options.minutes
    engine, adapters = dict(options.engine_option), dict(options.adapter)
    return request | {"resources": given(_NUMBERS), "engine": engine, "adapters": adapters}


def _adapter(text: str) -> tuple[str, str]:
    name, separator, place = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError("must be NAME=PLACE, such as sheep=owner/sheep-lora")
    return name, place


def _engine_options(options: argparse.Namespace) -> int:
    text = options.text.lower().replace("-", "_")
    rows = [["OPTION", "TYPE", "DEFAULT", "CHOICES AND MEANING"]]
    for one in engine_options().values():
        if text in one.name or text in one.help.lower():
            words = [one.help, f"one of {', '.join(map(str, one.choices))}" if one.choices else ""]
            if one.access == "never":
                words = [f"cannot be set: {one.reason}"]
            elif one.access == "profile":
                words.append(f"needs the profile's engine_options: {one.reason}")
            default = "-" if one.default in (None, "") else json.dumps(one.default)
            meaning = "; ".join(word.rstrip(".") for word in words if word)
            rows.append([one.name, " or ".join(one.types), default, meaning])
    write_table(rows)
    return 0


@_on_launches
async def _list(store: LaunchStore, options: argparse.Namespace) -> None:
    names = ("id", "name", "state", "profile", "job_id", "node", "model", "reason")
    launches = await store.list(options.team, state=None, after=None, limit=1000)
    rows = [[str(getattr(launch, name) or "-") for name in names] for launch in launches]
    write_table([[name.removesuffix("_id").upper() for name in names], *rows])


@_on_launches
async def _show(store: LaunchStore, options: argparse.Namespace) -> None:
    _print(await store.get(options.team, options.id))


@_on_launches
async def _log(store: LaunchStore, options: argparse.Namespace) -> None:
    sys.stdout.write(await store.log(options.team, options.id))


@_on_launches
async def _stop(store: LaunchStore, options: argparse.Namespace) -> None:
    _print(await store.stop(options.team, options.id))


@_on_launches
async def _delete(store: LaunchStore, options: argparse.Namespace) -> None:
    await store.delete(options.team, options.id)


def _print(launch: Launch) -> None:
    sys.stdout.write(json.dumps(launch_to_wire(launch), indent=2, default=str) + "\n")
