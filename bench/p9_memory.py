"""P9: proportional memory (PSS) of one API process, idle and holding long-polls."""

import asyncio
import random

import httpx

from bench.cpu import pss_kilobytes
from bench.load import HOST, connect, get
from bench.p1_submit import save_contexts
from bench.report import Options, Report
from bench.servers import MODEL, House, Server

WAITERS = 2_000
_BULK = 1_000
_SETTLE_SECONDS = 2.0


async def run(house: House, options: Options) -> Report:
    """No worker runs, so every long-poll waits; each on a result and a connection of its own."""
    environment = await house.environment("bench_p9")
    async with house.api(environment) as api:
        await asyncio.sleep(_SETTLE_SECONDS)
        idle = pss_kilobytes(api.pid)
        ids = await _submit(api)
        polls = [get(f"/results/{identifier}") for identifier in ids]
        async with connect(api.port, 64) as callers:  # fills what use fills: pools, caches, arenas
            await callers.run(lambda: random.choice(polls), options.seconds, (200,))
        used = pss_kilobytes(api.pid)
        waits = iter([get(f"/results/{identifier}?wait=60") for identifier in ids])
        async with connect(api.port, WAITERS) as callers:
            await asyncio.sleep(_SETTLE_SECONDS)
            connected = pss_kilobytes(api.pid)
            callers.send_once(waits.__next__)
            await asyncio.sleep(_SETTLE_SECONDS)
            waiting = pss_kilobytes(api.pid)
    report = Report("P9", "memory of one API process", ["PSS MB"])
    report.rows = [
        ("idle", [idle / 1000]),
        ("after polls of 64 callers", [used / 1000]),
        (f"with {WAITERS:,} open connections", [connected / 1000]),
        (f"with {WAITERS:,} waiting long-polls", [waiting / 1000]),
    ]
    report.check("PSS idle", idle / 1000, "<=", 120, "MB")
    report.check(
        "a waiting long-poll, its connection included", (waiting - used) / WAITERS, "<=", 40, "kB"
    )
    return report


async def _submit(api: Server) -> list[str]:
    """Submit as many results as there will be waiters; their ids."""
    context = (await save_contexts(api, 1))[0]
    ids: list[str] = []
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        while len(ids) < WAITERS:
            items = [{"model": MODEL, "context_id": context}] * _BULK
            answer = await client.post(f"http://{HOST}:{api.port}/results/", json=items)
            ids += [item["id"] for item in answer.json()]
    return ids
