"""Jobs in the storm: rows are sent, repeated, cancelled, retried and deleted. And a team past its budget."""

import asyncio
import sys
from dataclasses import replace
from typing import Any

from tests.chaos.stack import Stack
from tests.chaos.storm.client import FIRST_REST, Client, GivenUpError, Scene
from tests.chaos.storm.orders import SCRIPTED, SPENT, Order

_LIST = 5  # rows of a list
_POLL_SECONDS = 0.3
_DELETED_OF = 3  # one of so many jobs is deleted, however it ended
_SPENT_NUMBER = 10**9  # of the order that uses the budget up
_BUDGET_TOKENS = 5


async def job(client: Client) -> None:
    """Send the rows of a job in lists, each twice, and have it end; then send all rows again."""
    order = client.order
    del client.headers["Idempotency-Key"]
    body = {"key": order.key, "name": order.key, "webhook_url": client.scene.webhook_url}
    reply, created = await client.insist("POST", "/jobs", body)
    assert reply.status in (200, 201), (reply.status, created)
    order.job_id = created["id"]
    ids = list[str]()
    for start in range(0, len(order.prompts), _LIST):
        ids += await _send(client, range(start, min(start + _LIST, len(order.prompts))))
    order.ids = ids
    assert await _send(client, range(len(ids))) == ids, "a repeated row has another result"
    if order.intent == "cancel":
        await asyncio.sleep(order.pause)  # the moment that the order drew
        await _act(client, "cancel")
    else:
        await _act(client, "close")
    ended = await _ended(client)
    if order.intent in ("cancel", "fail") and ended["counts"]["failed"]:
        ended = await _retry(client, ended["last_place"])
    assert ended["counts"]["rows"] == len(ids), ended
    await _read(client)
    await _send(
        client, range(len(ids))
    )  # stores nothing: the job is closed, and its keys are known
    if order.number % _DELETED_OF == 0:
        reply, answer = await client.insist("DELETE", f"/jobs/{order.job_id}")
        assert reply.status in (204, 404), (reply.status, answer)
        order.is_deleted = True


async def _send(client: Client, numbers: range) -> list[str]:
    order = client.order
    items = [
        client.body(number) | {"job_id": order.job_id, "job_key": str(number)} for number in numbers
    ]
    for item in items:
        item.pop("webhook_url", None)
    reply, answers = await client.insist("POST", "/results/", items)
    assert reply.status == 202, (reply.status, answers)
    return [answer["id"] for answer in answers]


async def _act(client: Client, action: str, **body: int) -> Any:
    reply, answer = await client.insist("POST", f"/jobs/{client.order.job_id}/{action}", body)
    assert reply.status in (200, 202), (action, reply.status, answer)
    return answer


async def _ended(client: Client) -> dict[str, Any]:
    while True:
        reply, found = await client.insist("GET", f"/jobs/{client.order.job_id}")
        assert reply.status == 200, (reply.status, found)
        if found["state"] == "ended":
            assert found["counts"]["pending"] == 0, found
            client.order.ends += 1
            return dict(found)
        if client.scene.gives_up:
            raise GivenUpError(f"job {client.order.job_id} is {found}")
        await asyncio.sleep(_POLL_SECONDS)


async def _retry(client: Client, until: int) -> dict[str, Any]:
    """Send the failed rows again, and wait for their ends."""
    client.order.is_retried = True
    answer = await _act(client, "retry", until=until)
    assert answer["refused"] == [], answer
    return await _ended(client)


async def _read(client: Client) -> None:
    """Read all ends from the first place on: each key once."""
    keys, after = list[str](), 0
    while True:
        path = f"/jobs/{client.order.job_id}/results?after={after}&limit=7&full=false"
        reply, page = await client.insist("GET", path)
        assert reply.status == 200, (reply.status, page)
        if not page:
            break
        keys += [row["key"] for row in page]
        after = page[-1]["place"]
    assert sorted(map(int, keys)) == list(range(len(client.order.prompts))), keys


async def past_its_budget(client: Client) -> None:
    """Send as a team whose budget is used up, in one of the forms, until the refusal arrives."""
    prompt = client.order.prompts[0]
    common = {"model": SCRIPTED}
    messages = [{"role": "user", "content": prompt}]
    path, body = (
        ("/results/", client.body()),
        ("/results/", [client.body()]),
        ("/v1/chat/completions", common | {"messages": messages}),
        ("/v1/completions", common | {"prompt": prompt}),
    )[client.order.number % 4]
    while True:
        try:
            reply, answer = await client.once("POST", path, body)
        except OSError:
            reply, answer = None, None
        if reply and reply.status not in (502, 503, 504):
            assert reply.status == 429, (path, reply.status, answer)
            assert "budget_exhausted" in str(answer), (path, answer)
            return
        if client.scene.gives_up:
            raise GivenUpError(f"{path}: {answer}")
        await asyncio.sleep(FIRST_REST)


async def use_up(stack: Stack, scene: Scene) -> None:
    """Give a team a budget, and send results until each API refuses further ones."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "app", "budget", "set", SPENT, "--tokens", str(_BUDGET_TOKENS),
        env=stack.environment,
    )  # fmt: skip
    assert await process.wait() == 0
    number = _SPENT_NUMBER
    for port in scene.ports:
        while await _is_accepted(replace(scene, ports=[port]), number):
            number += 1
            await asyncio.sleep(_POLL_SECONDS)


async def _is_accepted(scene: Scene, number: int) -> bool:
    prompt = f"Order {number}.0 {{{{chunks={2 * _BUDGET_TOKENS}}}}}"
    order = Order(number, "native", SPENT, "plain", SCRIPTED, [prompt])
    client = Client(scene, order)
    reply, result = await client.once("POST", "/results/", client.body())
    if reply.status == 429:
        return False
    order.ids = [result["id"]]
    scene.log.orders.append(order)
    await client.follow(result["id"])
    return True
