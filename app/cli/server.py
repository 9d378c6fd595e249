"""`python -m app server`: the registered Triton servers."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app.cli.arguments import Subcommands, add_command, add_subcommands
from app.cli.table import write_table

if TYPE_CHECKING:
    from app.inference.server_store import ServerStore

_HELP = """The registered Triton servers, in addition to those that TRITON_GRPC_SERVICE names. Running
processes apply a change within LLM_TRITON_REFRESH_SECONDS; results go to the least busy server
that has their model ready. GET /servers returns their health. More: docs/servers.md."""


def add_to(commands: Subcommands) -> None:
    text = "Show, register, drain and remove Triton servers."
    parser = add_command(commands, "server", text, description=_HELP)
    actions = add_subcommands(parser)

    add_command(
        actions, "list", "Show the registered servers, and how many results run on each.", _list
    )
    adding = add_command(actions, "add", "Register a server.", _add)
    adding.add_argument("name", help="letters, digits, `.`, `_` and `-`")
    adding.add_argument("grpc", help="its gRPC address, host:port")
    adding.add_argument("--http", help="its HTTP address, host:port")
    adding.add_argument("--metrics", help="its metrics address, host:port")
    adding.add_argument(
        "--slots",
        type=int,
        help="most results that each worker runs on it at a time (LLM_WORKER_SLOTS)",
    )
    for name, run, text in (
        ("drain", _drain, "Send a server no new results; its running results finish."),
        ("resume", _resume, "Send a drained server results again."),
        ("remove", _remove, "Remove a server; its running results finish."),
    ):
        add_command(actions, name, text, run).add_argument("name", help="the server's name")


def _list(_options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        running = await store.running()
        table = [["name", "grpc", "slots", "state", "running"]]
        for server in await store.all():
            state = "draining" if server.is_draining else "active"
            slots = "-" if server.slots is None else str(server.slots)
            count = str(running.get(server.name, 0))
            table.append([server.name, server.grpc, slots, state, count])
        write_table(table)
        _report(
            "In addition: the servers that TRITON_GRPC_SERVICE names. Their health: GET /servers."
        )

    return _with_store(work)


def _add(options: argparse.Namespace) -> int:
    from app.inference.server_store import ServerAddress

    address = ServerAddress(
        options.name, options.grpc, options.http, options.metrics, options.slots
    )

    async def work(store: "ServerStore") -> None:
        await store.add(address)
        _report(f"{address.name} is registered; GET /servers returns its health.")

    return _with_store(work)


def _drain(options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        await store.drain(options.name, is_draining=True)
        _report(f"{options.name} gets no new results; its running results finish.")

    return _with_store(work)


def _resume(options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        await store.drain(options.name, is_draining=False)
        _report(f"{options.name} gets results again.")

    return _with_store(work)


def _remove(options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        await store.remove(options.name)
        _report(f"{options.name} is removed; its running results finish.")

    return _with_store(work)


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _with_store(work: Callable[["ServerStore"], Awaitable[None]]) -> int:
    from app.cli.database import with_database
    from app.inference.server_store import ServerStore

    return with_database("server", lambda database, _: work(ServerStore(database)))
