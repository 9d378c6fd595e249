"""Many requests of one team at once, and few of another."""

import asyncio

from pydantic import SecretStr

from app.core.database import Database
from app.core.fair_share import FairShares
from app.core.settings import Settings
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


async def has(held: list[str], count: int) -> bool:
    return len(held) >= count
