"""`python -m app server`: the registered Triton servers."""

import argparse
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from app.cli.table import write_table

if TYPE_CHECKING:
    from app.inference.server_store import ServerStore

_HELP = """The registered Triton servers, in addition to those that TRITON_GRPC_SERVICE names. Running
processes apply a change within LLM_TRITON_REFRESH_SECONDS; results go to the least busy server
that has their model ready. GET /servers returns their health. More: docs/servers.md."""


def add_server_commands(parser: argparse.ArgumentParser) -> None:
    parser.description = _HELP
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(
        name: str, run: Callable[[argparse.Namespace], int], text: str
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    add("list", _list, "Show the registered servers, and how many results run on each.")
    adding = add("add", _add, "Register a server.")
    adding.add_argument("name", help="letters, digits, `.`, `_` and `-`")
    adding.add_argument("grpc", help="its gRPC address, host:port")
    adding.add_argument("--http", help="its HTTP address, host:port")
    adding.add_argument("--metrics", help="where its metrics are, host:port")
    adding.add_argument(
        "--slots",
        type=int,
        help="most results that each worker runs on it at a time (LLM_WORKER_SLOTS)",
    )
    for name, run, text in (
        ("drain", _drain, "Give a server nothing more to do; what runs on it runs to its end."),
        ("resume", _resume, "Give a drained server results again."),
        ("remove", _remove, "Forget a server; what runs on it runs to its end."),
    ):
        add(name, run, text).add_argument("name", help="the server's name")


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
        _report(f"{options.name} is given nothing more; what runs on it runs to its end.")

    return _with_store(work)


def _resume(options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        await store.drain(options.name, is_draining=False)
        _report(f"{options.name} is given results again.")

    return _with_store(work)


def _remove(options: argparse.Namespace) -> int:
    async def work(store: "ServerStore") -> None:
        await store.remove(options.name)
        _report(f"{options.name} is forgotten; what runs on it runs to its end.")

    return _with_store(work)


def _report(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def _with_store(work: Callable[["ServerStore"], Awaitable[None]]) -> int:
    from app.cli.database import with_database
    from app.inference.server_store import ServerStore

    return with_database("server", lambda database, _: work(ServerStore(database)))
