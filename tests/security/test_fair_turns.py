"""Many requests of one team at once, and few of another."""

import asyncio
from typing import Any
from uuid import UUID

import orjson
from pydantic import SecretStr
from starlette.requests import Request
from starlette.types import Message

from app.api.pagination import page_response
from app.core.database import Database
from app.core.fair_share import FairShares
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.sizes import PageSizes, read_page
from tests.conftest import run_service
from tests.integration.support import until
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

REQUESTS = 300


async def test_a_request_overtakes_the_many_of_another_team(settings: Settings) -> None:
    guarded = settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    tokens = {team: sign({"team_id": team, "token_id": team}) for team in ("hostile", "polite")}
    ended: list[str] = []
    async with run_service(guarded, with_worker=False) as service:

        async def create_context(team: str) -> None:
            headers = {"Authorization": f"Bearer {tokens[team]}"}
            answer = await service.client.post(
                "/contexts/", json={"content": "Hi"}, headers=headers
            )
            assert answer.status_code == 201
            ended.append(team)

        for team in tokens:
            await create_context(team)  # its token is known now
        ended.clear()
        await asyncio.gather(*map(create_context, ["hostile"] * REQUESTS + ["polite"]))
    assert ended.index("polite") < REQUESTS // 2


async def test_a_team_leaves_half_of_the_connections_to_others(settings: Settings) -> None:
    may_go = asyncio.Event()
    held: list[str] = []
    async with Database(settings, "test") as database:
        shares = FairShares(settings.database_pool_size)

        async def hold(team: str) -> None:
            async with database.connection():
                held.append(team)
                await may_go.wait()

        def start(team: str) -> asyncio.Task[None]:
            return asyncio.create_task(shares.run(team, hold(team)))

        half = settings.database_pool_size // 2
        holding = [start("hostile") for _ in range(half)]
        await until(lambda: has(held, half))
        holding += [start("hostile") for _ in range(half)]
        await asyncio.sleep(0)  # they wait for a connection before the other team
        holding.append(start("polite"))
        await until(lambda: has(held, half + 1))
        assert held == ["hostile"] * half + ["polite"]
        may_go.set()
        await asyncio.gather(*holding)
    asyncio.get_running_loop().set_task_factory(None)
    assert held.count("hostile") == 2 * half


async def test_other_teams_run_between_the_rows_of_a_page(settings: Settings) -> None:
    rows = [{"text": "x" * 2_000} for _ in range(50)]
    request = Request({"type": "http", "method": "GET", "path": "/results/", "headers": [],
                       "query_string": b"limit=50", "server": ("localhost", 80), "scheme": "http"})  # fmt: skip
    messages: list[Message] = []
    turns = 0

    async def render() -> None:
        page = await page_response(request, rows, "an-id")
        assert page.headers["link"] == '</results/?limit=50&after=an-id>; rel="next"'
        await page(request.scope, request.receive, send)

    async def send(message: Message) -> None:
        messages.append(message)

    async def run_beside() -> None:
        nonlocal turns
        while not messages:
            turns += 1
            await asyncio.sleep(0)

    shares = FairShares(4, turn_seconds=1e-9)  # each row uses it up
    await asyncio.gather(shares.run("hostile", render()), run_beside())
    shares.close()
    start, *pieces = messages
    body = b"".join(piece["body"] for piece in pieces)
    assert orjson.loads(body) == rows
    assert (b"content-length", str(len(body)).encode()) in start["headers"]
    assert [piece["more_body"] for piece in pieces] == [True, False]
    assert turns >= len(rows)


async def test_a_long_page_is_read_in_pieces(settings: Settings) -> None:
    ids = [new_id() for _ in range(250)]
    pieces: list[list[UUID]] = []

    async def fetch(wanted: list[UUID]) -> list[dict[str, object]]:
        pieces.append(wanted)
        return [{"id": one} for one in wanted]

    sizes: Any = [{"id": one, "size": 1} for one in ids]
    for limit, following in ((250, ids[-1]), (300, None)):
        pieces.clear()
        page = await read_page(PageSizes.of(sizes, limit), fetch)  # type: ignore[arg-type]
        assert [row["id"] for row in page.rows] == ids
        assert page.following == following
        assert [len(piece) for piece in pieces] == [100, 100, 50]


async def has(held: list[str], count: int) -> bool:
    return len(held) >= count
