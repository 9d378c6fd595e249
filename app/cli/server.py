"""`python -m app server`: the registered Triton servers."""

import argparse
import sys
from pathlib import Path

from app.cli.arguments import add_command, add_subcommands
from app.cli.database import store_command
from app.cli.table import write_table
from app.inference.server_store import ServerAddress, ServerStore

_HELP = """The registered Triton servers, in addition to those that TRITON_GRPC_SERVICE names. Running
processes apply a change within LLM_TRITON_REFRESH_SECONDS; results go to the least busy server
that has their model ready. GET /servers returns their health. More: docs/servers.md."""

_on_servers = store_command("server", lambda database, _: ServerStore(database))


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    actions = add_subcommands(parser)
    text = "Show the registered servers, and how many results run on each."
    add_command(actions, "list", text, _list)
    add = add_command(actions, "add", "Register a server.", _add).add_argument
    add("name", help="letters, digits, `.`, `_` and `-`")
    add("grpc", help="its gRPC address, host:port")
    add("--http", help="its HTTP address, host:port")
    add("--metrics", help="its metrics address, host:port")
    add("--secret-file", type=_secret, dest="secret", help="file with the secret that it needs")
    text = "most results that each worker runs on it at a time (LLM_WORKER_SLOTS)"
    add("--slots", type=int, help=text)
    for name, run, text in (
        ("drain", _drain, "Send a server no new results; its running results finish."),
        ("resume", _resume, "Send a drained server results again."),
        ("remove", _remove, "Remove a server; its running results finish."),
    ):
        add_command(actions, name, text, run).add_argument("name", help="the server's name")


@_on_servers
async def _list(store: ServerStore, _options: argparse.Namespace) -> None:
    running = await store.running()
    table = [["name", "grpc", "slots", "state", "running"]]
    for server in await store.all():
        state = "draining" if server.is_draining else "active"
        slots = "-" if server.slots is None else str(server.slots)
        count = str(running.get(server.name, 0))
        table.append([server.name, server.grpc, slots, state, count])
    write_table(table)
    _report("In addition: the servers that TRITON_GRPC_SERVICE names. Their health: GET /servers.")


@_on_servers
async def _add(store: ServerStore, options: argparse.Namespace) -> None:
    name = options.name
    server = ServerAddress(
        name, options.grpc, options.http, options.metrics, options.slots, secret=options.secret
    )
    await store.add(server)
    _report(f"{name} is registered; GET /servers returns its health.")


@_on_servers
async def _drain(store: ServerStore, options: argparse.Namespace) -> None:
    await store.drain(options.name, is_draining=True)
    _report(f"{options.name} gets no new results; its running results finish.")


@_on_servers
async def _resume(store: ServerStore, options: argparse.Namespace) -> None:
    await store.drain(options.name, is_draining=False)
    _report(f"{options.name} gets results again.")


@_on_servers
async def _remove(store: ServerStore, options: argparse.Namespace) -> None:
    await store.remove(options.name)
    _report(f"{options.name} is removed; its running results finish.")


def _secret(file: str) -> str:
    """Not given on the command line, which other users of the machine see."""
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise argparse.ArgumentTypeError(f"{file} cannot be read: {error}") from None


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")
