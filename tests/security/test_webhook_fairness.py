"""A team whose webhooks hang, by names, ports, nameservers and others' receivers; and another team."""

import asyncio
import threading
from typing import Any

import asyncpg
import pytest

from app.core.settings import Settings
from tests.conftest import make_settings
from tests.integration.webhook_receiver import Call, answer, delivering, receiving, silence
from tests.integration.webhooks.test_webhook_delivery import owe, until_calls, until_ended
from tests.postgres import PostgresServer

HOSTILE, POLITE = "hostile", "polite"


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    """A hanging call lasts longer than the test."""
    return make_settings(
        postgres_server, database_name, webhook_allow_private=True, webhook_timeout_seconds=100.0
    )


def here(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
    """Every name is an address of this machine."""
    return [(0, 0, 0, "", ("127.0.0.1", port))]


@pytest.mark.trial
async def test_names_without_end_leave_places_to_other_teams(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as hanging, receiving() as receiver:
        hanging.respond = silence
        for n in range(100):
            await owe(connection, f"http://h{n}.example:{hanging.port}/", team=HOSTILE)
        async with delivering(settings, lookup=here):
            await until_calls(hanging, 20)
            ids = await owe(connection, receiver.url, 20, team=POLITE)
            for result in ids:
                assert (await until_ended(connection, result, 60))["state"] == "delivered"


@pytest.mark.trial
async def test_further_teams_leave_places_too(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async with receiving() as hanging, receiving() as receiver:
        hanging.respond = silence
        for team in range(5):
            for n in range(40):
                url = f"http://h{n}.example:{hanging.port}/"
                await owe(connection, url, team=f"{HOSTILE}-{team}")
        async with delivering(settings, lookup=here):
            await until_calls(hanging, 30)
            (result,) = await owe(connection, receiver.url, team=POLITE)
            assert (await until_ended(connection, result, 60))["state"] == "delivered"


@pytest.mark.trial
async def test_calls_of_others_to_a_receiver_leave_it_to_its_own_team(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    async def respond(call: Call, writer: asyncio.StreamWriter) -> None:
        await (silence if "slow" in call.line else answer(204))(call, writer)

    async with receiving() as receiver:
        receiver.respond = respond
        await owe(connection, f"{receiver.url}?slow", 50, team=HOSTILE)
        async with delivering(settings):
            await until_calls(receiver, 8)
            ids = await owe(connection, receiver.url, 10, team=POLITE)
            for result in ids:
                assert (await until_ended(connection, result, 60))["state"] == "delivered"


async def test_nameservers_that_hang_leave_threads_to_other_teams(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    release, asked = threading.Event(), []

    def lookup(host: str, port: int, **members: Any) -> list[tuple[Any, ...]]:
        if host.startswith("slow"):
            asked.append(host)
            release.wait(100)
        return here(host, port, **members)

    brief = settings.model_copy(update={"webhook_timeout_seconds": 0.5})
    async with receiving() as receiver:
        for n in range(100):
            await owe(connection, f"http://slow{n}.example:{receiver.port}/", team=HOSTILE)
        try:
            # Calls that are over leave their threads behind: the next calls must not take more.
            async with delivering(brief, (0.05,) * 100, lookup):
                (result,) = await owe(
                    connection, f"http://quick.example:{receiver.port}/", team=POLITE
                )
                assert (await until_ended(connection, result, 60))["attempts"] <= 3
                (result,) = await owe(
                    connection, f"http://quick.example:{receiver.port}/", team=POLITE
                )
                row = await until_ended(connection, result, 60)
                assert row["state"] == "delivered"
                assert row["attempts"] <= 3  # a busy machine may time out, too
                assert 0 < len(asked) <= 8
        finally:
            release.set()
