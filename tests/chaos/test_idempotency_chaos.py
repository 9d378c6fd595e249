"""One key, two API processes, connections that break at COMMIT: one row and one id."""

import asyncio
import itertools
import re
from collections import defaultdict

from app.cli.up import processes
from tests.chaos.cutting_proxy import Cut, CuttingProxy
from tests.chaos.http_client import Answer, HttpClient
from tests.chaos.stack import PARAMETERS, Process, Stack

AT_ONCE = 100
KEYS = 20
CUTS = 60
SENDERS = 30
# As in test_group_commit_chaos: every kind of cut, also two on end.
FATES = (
    *(Cut.ANSWER_LOST, None, Cut.BEFORE, None, Cut.UNKNOWN, None, Cut.UNCOMMITTED, None),
    *(Cut.ANSWER_LOST, Cut.BEFORE, None, Cut.UNKNOWN, Cut.ANSWER_LOST, None),
)
_MARKER = "at the commit"


def body(content: str, key: str) -> dict[str, object]:
    return {
        "model": "scripted",
        "content": content,
        "parameters": PARAMETERS,
        "idempotency_key": key,
    }


async def test_identical_posts_to_two_processes(stack: Stack) -> None:
    """A hundred at once, half to each: one row; and of two bodies, one."""
    port = processes.free_port()
    second = Process(
        "api 2",
        "serve",
        stack.environment | {"LLM_PORT": str(port)},
        stack.directory / "api_2.log",
        ready_url=f"http://127.0.0.1:{port}/health/ready",
        grace=10,
    )
    await second.start()
    try:
        async with HttpClient("127.0.0.1", port, AT_ONCE) as client:
            clients = (stack.client, client)
            for number in range(KEYS):
                same = body(f"same {number}", f"key {number}")
                answers = await asyncio.gather(
                    *(clients[n % 2].post("/results/", same) for n in range(AT_ONCE))
                )
                assert {answer.status for answer in answers} == {202}
                assert len({answer.json["id"] for answer in answers}) == 1
            assert await stack.count("true") == KEYS
            await _check_contest(clients)
        assert await stack.count("true") == KEYS + 1
    finally:
        await second.stop()


async def _check_contest(clients: tuple[HttpClient, HttpClient]) -> None:
    """Each process is sent another body under the same key at the same moment."""
    answers = await asyncio.gather(
        *(clients[n % 2].post("/results/", body(f"of {n % 2}", "k")) for n in range(AT_ONCE))
    )
    by_status: defaultdict[int, list[Answer]] = defaultdict(list)
    for answer in answers:
        by_status[answer.status].append(answer)
    assert {status: len(group) for status, group in by_status.items()} == {202: 50, 409: 50}
    (winner,) = {answer.json["id"] for answer in by_status[202]}
    assert {answer.json["result_id"] for answer in by_status[409]} == {winner}


async def test_keys_while_connections_break_at_commit(stack: Stack) -> None:
    """Each request is sent twice at once, beside others without a key; each is stored once."""
    server = stack.postgres
    proxy = CuttingProxy(server.host, server.port, re.compile(_MARKER.encode()), FATES, CUTS)
    numbers = itertools.count()
    accepted: dict[str, str] = {}

    async def send_until_all_are_cut() -> None:
        while not proxy.all_cut.is_set():
            number = next(numbers)
            keyed = body(f"keyed {number} {_MARKER}", f"key {number}")
            plain = body(f"plain {number} {_MARKER}", "") | {"idempotency_key": None}
            first, again, other = await asyncio.gather(
                *(stack.client.post("/results/", one) for one in (keyed, keyed, plain))
            )
            assert (first.status, again.status, other.status) == (202, 202, 202), (first, again)
            assert first.json["id"] == again.json["id"]
            accepted[first.json["id"]] = str(keyed["content"])
            accepted[other.json["id"]] = str(plain["content"])
            late = await stack.client.post("/results/", keyed)
            assert late.json["id"] == first.json["id"]

    async with proxy.run():
        await stack.restart_api(LLM_DATABASE_URL=f"127.0.0.1:{proxy.port}")
        await asyncio.gather(*(send_until_all_are_cut() for _ in range(SENDERS)))
        assert set(proxy.cuts) == set(Cut)
        rows = await stack.fetch(
            """SELECT r.id, c.content, k.key FROM results r JOIN contexts c ON c.id = r.context_id
               LEFT JOIN idempotency_keys k ON k.result_id = r.id"""
        )
        assert {str(row["id"]): row["content"] for row in rows} == accepted
        for row in rows:
            kind, number, *_ = row["content"].split()
            assert row["key"] == (f"key {number}" if kind == "keyed" else None)
        (contexts,) = await stack.fetch("SELECT count(*) FROM contexts")
        assert contexts["count"] == len(accepted)
        await stack.api.stop()
