"""Connections that break at COMMIT: no caller sees an error, and every stored id has a response."""

import asyncio
import itertools
import re
from collections import Counter

from app.cli.up.triton import EmbeddedTriton
from tests.chaos.cutting_proxy import Cut, CuttingProxy
from tests.chaos.history import check_history, check_logs
from tests.chaos.stack import PARAMETERS, Stack, ask_directly, check_completed

CUTS = 120
SENDERS = 40
# Every kind of cut, also two on end; a statement then passes, or its senders would wait indefinitely.
FATES = (
    *(Cut.ANSWER_LOST, None, Cut.BEFORE, None, Cut.UNKNOWN, None, Cut.UNCOMMITTED, None),
    *(Cut.ANSWER_LOST, Cut.BEFORE, None, Cut.UNKNOWN, Cut.ANSWER_LOST, None),
)
_MARKER = "at the commit"
# The database refuses such a row for its data, and with it the statement that holds it.
_REFUSE_BAD_ROWS = (
    """CREATE FUNCTION refuse_bad() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
         RAISE check_violation USING MESSAGE = 'bad row';
       END $$""",
    """CREATE TRIGGER refuse_bad BEFORE INSERT ON contexts FOR EACH ROW
       WHEN (NEW.content LIKE 'bad row%') EXECUTE FUNCTION refuse_bad()""",
)


async def test_posts_while_connections_break_at_commit(stack: Stack) -> None:
    """Many cuts under concurrent POSTs, some of which hold a row that the database refuses."""
    for statement in _REFUSE_BAD_ROWS:
        await stack.fetch(statement)
    server = stack.postgres
    proxy = CuttingProxy(server.host, server.port, re.compile(_MARKER.encode()), FATES, CUTS)
    numbers = itertools.count()
    accepted: dict[str, str] = {}
    refused: Counter[int] = Counter()

    async def send_until_all_are_cut() -> None:
        while not proxy.all_cut.is_set():
            number = next(numbers)
            kind = "bad row" if number % 50 == 7 else "good row"
            prompt = f"{kind} {number} {_MARKER} {{{{chunks=1}}}}"
            body = {"model": "scripted", "content": prompt, "parameters": PARAMETERS}
            answer = await stack.client.post("/results/", body)
            if kind == "bad row":
                refused[answer.status] += 1
            else:
                assert answer.status == 202, answer
                accepted[answer.json["id"]] = prompt

    async with proxy.run():
        await stack.restart_api(LLM_DATABASE_URL=f"127.0.0.1:{proxy.port}")
        await asyncio.gather(*(send_until_all_are_cut() for _ in range(SENDERS)))
        assert proxy.cuts.total() >= CUTS
        assert set(proxy.cuts) == set(Cut)

        rows = await stack.fetch(
            "SELECT r.id, c.content FROM results r JOIN contexts c ON c.id = r.context_id"
        )
        assert {str(row["id"]): row["content"] for row in rows} == accepted
        (contexts,) = await stack.fetch("SELECT count(*) FROM contexts")
        assert contexts["count"] == len(accepted)
        assert set(refused) == {500}
        await stack.api.stop()


async def test_a_worker_whose_connections_break_at_commit(
    stack: Stack, triton: EmbeddedTriton
) -> None:
    """Claims, texts and ends are cut alike: no attempt counts as lost, none is run beside another."""
    prompts = [f"{_MARKER} {number} {{{{chunks=8 delay_ms=100}}}}" for number in range(300)]
    asking = asyncio.create_task(ask_directly(triton, prompts))
    server = stack.postgres
    # Claims and heartbeats name the model; texts and ends hold invented words. Ids are in no
    # statement by their letters: a worker whose every heartbeat is cut has to lose its lease.
    marker = re.compile(rb"scripted|[a-z]-[0-9a-f]{6}")
    proxy = CuttingProxy(server.host, server.port, marker, (None, None, *FATES), limit=80)
    async with proxy.run():
        await stack.start_worker(
            "alice", LLM_DATABASE_URL=f"127.0.0.1:{proxy.port}", LLM_WORKER_SLOTS="20"
        )
        accepted = await stack.send(prompts)
        await stack.until_terminal(100)
        assert set(proxy.cuts) == set(Cut)
        await check_completed(stack, accepted, await asking)
        assert await stack.count("lost_attempts = 0") == len(prompts)
        log = stack.log("alice")
        if "fenced" not in log:
            # After a cut, the worker recognises the rows that it wrote before.
            assert "decided elsewhere" not in log, log[-20_000:]
        await check_history(stack)
        check_logs(stack)
        await stack.workers["alice"].stop()
