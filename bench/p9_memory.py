"""P9: proportional memory (PSS) of one API process: idle, with long-polls, and with open streams."""

import asyncio
import random
from collections.abc import Sequence

from bench import progress
from bench.cpu import pss_kilobytes
from bench.idle import held, queue, stream_of, wait_for
from bench.load import connect, get
from bench.report import Options, Report
from bench.servers import House, Server

HOLDERS = 2_000
_SETTLE_SECONDS = 2.0


async def run(house: House, options: Options) -> Report:
    """Nothing ends, so every long-poll waits and every stream stays open; each on a result of its own.

    The two have processes of their own: memory that one frees would be used by the other.
    """
    report = Report("P9", "memory of one API process", ["PSS MB"])
    environment = await house.environment("bench_p9")
    async with house.api(environment) as api:
        await asyncio.sleep(_SETTLE_SECONDS)
        progress.show("idle")
        idle = pss_kilobytes(api.pid)
        ids = await queue(house, "bench_p9", HOLDERS)
        used = await _use(api, ids, options)
        progress.show(f"{HOLDERS:,} long-polls")
        polls = await _hold(api, [wait_for(identifier) for identifier in ids])
    async with house.api(environment) as api:
        used_again = await _use(api, ids, options)
        progress.show(f"{HOLDERS:,} streams")
        streams = await _hold(api, [stream_of(identifier) for identifier in ids])
    report.rows = [
        ("idle", [idle / 1000]),
        ("after polls of 64 callers", [used / 1000]),
        (f"with {HOLDERS:,} open connections", [polls[0] / 1000]),
        (f"with {HOLDERS:,} waiting long-polls", [polls[1] / 1000]),
        ("another process after polls of 64 callers", [used_again / 1000]),
        (f"with {HOLDERS:,} open streams", [streams[1] / 1000]),
    ]
    report.check("PSS idle", idle / 1000, "<=", 120, "MB")
    each = "its connection included"
    report.check(f"a waiting long-poll, {each}", (polls[1] - used) / HOLDERS, "<=", 20, "kB")
    report.check(f"an open stream, {each}", (streams[1] - used_again) / HOLDERS, "<=", 64, "kB")
    return report


async def _use(api: Server, ids: Sequence[str], options: Options) -> int:
    """Fill what use fills, pools, caches and arenas; the memory then."""
    polls = [get(f"/results/{identifier}") for identifier in ids]
    async with connect(api.port, 64) as callers:
        await callers.run(lambda: random.choice(polls), options.seconds, (200,))
    return pss_kilobytes(api.pid)


async def _hold(api: Server, paths: Sequence[str]) -> tuple[int, int]:
    """The memory with so many open connections, and with a request held on each."""
    async with connect(api.port, len(paths)):
        await asyncio.sleep(_SETTLE_SECONDS)
        connected = pss_kilobytes(api.pid)
    async with held(api, paths):
        return connected, pss_kilobytes(api.pid)
