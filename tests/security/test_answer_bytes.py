"""Texts in memory while clients read slowly, send slowly or ask for everything: bounded in bytes."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import asyncpg
import httpx
import orjson
import pytest
from starlette.types import Message, Receive, Scope, Send

from app.api.middleware.byte_accounts import PIECE_BYTES, ByteAccounts
from app.auth.principal import ANYONE
from app.batches.files import FileDetails
from app.core.byte_budget import ByteBudget, charge
from app.core.ids import new_id
from app.core.settings import Settings
from app.results.requests import ResultCreate
from app.results.sizes import PAGE_BYTES
from tests.conftest import Service, make_settings, run_service
from tests.postgres import PostgresServer

MIB = 2**20
BUDGET = 64 * MIB
LONG = 1_000_000


@pytest.fixture
def settings(postgres_server: PostgresServer, database_name: str) -> Settings:
    return make_settings(postgres_server, database_name, max_bytes_in_flight=BUDGET)


@pytest.fixture
async def api(settings: Settings) -> AsyncIterator[Service]:
    async with run_service(settings, with_worker=False) as running:
        # On a slow machine, too, none is refused.
        running.services.byte_budget._wait_seconds = 100.0
        yield running


class SlowClient:
    """A client that reads the head of a response, and its body once `goes_on` is set."""

    def __init__(self, api: Service, path: str, body: bytes | None = None) -> None:
        self.received = 0
        self.started = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.status = 0
        self.largest = 0
        self._body = body
        method = "GET" if body is None else "POST"
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        if body is not None:
            headers.append((b"content-length", b"%d" % len(body)))
        where, _, query = path.partition("?")
        scope: dict[str, Any] = {
            "type": "http",
            "method": method,
            "path": where,
            "raw_path": where.encode(),
            "query_string": query.encode(),
            "headers": headers,
            "http_version": "1.1",
            "scheme": "http",
            "server": ("localhost", 80),
            "client": ("127.0.0.1", 1),
            "root_path": "",
            "asgi": {"version": "3.0"},
        }
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.started.set()
            return
        await self.goes_on.wait()
        self.received += len(message.get("body", b""))
        self.largest = max(self.largest, len(message.get("body", b"")))


async def until_waiting(api: Service, clients: list[SlowClient]) -> list[SlowClient]:
    """Wait until each client has an answer or waits for the budget; those with an answer."""
    budget = api.services.byte_budget
    async with asyncio.timeout(60):
        while True:
            started = [one for one in clients if one.started.is_set()]
            if len(started) + len(budget._waiting) == len(clients):
                return started
            await asyncio.sleep(0.01)


async def until_held(budget: ByteBudget, clients: int) -> None:
    """Wait until each client holds a long text or waits for the budget."""
    async with asyncio.timeout(60):
        while True:
            if budget.used and len(budget._waiting) + budget.used // (4 * LONG) == clients:
                return
            await asyncio.sleep(0.01)


async def finish(clients: list[SlowClient]) -> None:
    for one in clients:
        one.goes_on.set()
    async with asyncio.timeout(60):
        await asyncio.gather(*(one.task for one in clients))


async def fill(connection: asyncpg.Connection, count: int, text: str = "x" * LONG) -> list[str]:
    """Saved contexts, each with a completed result, of this text; their results, the newest first."""
    ids = [new_id() for _ in range(count)]
    await connection.execute(
        "INSERT INTO contexts (id, content) SELECT id, $2 FROM unnest($1::uuid[]) AS i(id)",
        ids,
        text,
    )
    await connection.execute(
        """INSERT INTO results (id, context_id, model_name, parameters, deadline_at, state,
                                finished_at, output)
        SELECT id, id, 'm', '{}', now(), 'completed', now(), $2 FROM unnest($1::uuid[]) AS i(id)""",
        *(ids, text),
    )
    return [str(one) for one in reversed(ids)]


@pytest.mark.parametrize("path", ["/contexts/{}", "/results/{}", "/results/export?limit=1"])
async def test_slow_readers_of_long_texts_wait_for_each_other(
    api: Service, connection: asyncpg.Connection, path: str
) -> None:
    """Each read holds its text four times; one team has half of the budget."""
    (one,) = await fill(connection, 1)
    clients = [SlowClient(api, path.format(one)) for _ in range(20)]
    started = await until_waiting(api, clients)
    assert 1 <= len(started) <= BUDGET // 2 // (4 * LONG)
    assert api.services.byte_budget.used <= BUDGET // 2
    small = await asyncio.wait_for(api.client.get("/contexts/?limit=0"), 20)
    assert small.status_code == 422, "small answers pass"
    await finish(clients)
    assert all(one.status == 200 and one.received > LONG for one in clients)
    assert all(one.largest <= 65_536 for one in clients), "the server keeps a piece of each"
    assert api.services.byte_budget.used == 0


async def test_slow_readers_of_an_ended_stream_wait_for_each_other(
    api: Service, connection: asyncpg.Connection
) -> None:
    (one,) = await fill(connection, 1)
    clients = [SlowClient(api, f"/results/{one}/stream") for _ in range(20)]
    budget = api.services.byte_budget
    await until_held(budget, 20)
    assert budget.used <= BUDGET // 2
    await finish(clients)
    assert all(one.received > 2 * LONG for one in clients), "its deltas, and the result at the end"
    assert budget.used == 0


async def test_bodies_are_read_within_the_budget(api: Service) -> None:
    body = orjson.dumps({"content": "x" * 1_900_000})
    clients = [SlowClient(api, "/contexts/", body) for _ in range(12)]
    held = await until_waiting(api, clients)
    assert 1 <= len(held) <= BUDGET // 2 // (4 * len(body))
    assert sum(one._body is not None for one in clients) >= 12 - BUDGET // 2 // (4 * len(body))
    await finish(clients)
    assert [one.status for one in clients] == [201] * 12
    assert api.services.byte_budget.used == 0


async def pages(client: httpx.AsyncClient, path: str) -> list[list[dict[str, Any]]]:
    found = []
    while path:
        answer = await client.get(path)
        assert answer.status_code == 200, answer.text
        assert len(answer.content) < PAGE_BYTES + 2 * LONG
        found.append(answer.json())
        path = str(answer.links["next"]["url"]) if "next" in answer.links else ""
    return found


@pytest.mark.parametrize("path", ["/contexts/?limit=9", "/results/?limit=9&full=true"])
async def test_pages_end_by_bytes_and_link_on(
    api: Service, connection: asyncpg.Connection, path: str
) -> None:
    ids = await fill(connection, 10)
    found = await pages(api.client, path)
    assert len(found) >= 3
    assert [row["id"] for page in found for row in page] == ids
    assert all(len(row.get("content") or row["result"]) == LONG for page in found for row in page)


@pytest.mark.trial
async def test_pages_of_compressed_messages_end_by_bytes(
    api: Service, connection: asyncpg.Connection
) -> None:
    """PostgreSQL stores a megabyte of one letter in ten kilobytes."""
    await connection.execute(
        """INSERT INTO contexts (id, messages)
        SELECT id, jsonb_build_array(jsonb_build_object('role', 'user', 'content', $2::text))
        FROM unnest($1::uuid[]) AS i(id)""",
        *([new_id() for _ in range(10)], "x" * LONG),
    )
    found = await pages(api.client, "/contexts/?limit=10")
    assert len(found) >= 2
    assert sum(map(len, found)) == 10


async def test_pages_of_short_rows_end_by_their_number(
    api: Service, connection: asyncpg.Connection
) -> None:
    ids = await fill(connection, 10, "short")
    for path in ("/contexts/?limit=5", "/results/?limit=5&full=true", "/results/?limit=5"):
        found = await pages(api.client, path)
        assert [len(page) for page in found][:2] == [5, 5]
        assert [row["id"] for page in found for row in page] == ids


async def test_exports_and_downloads_are_streams(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    few = settings.model_copy(update={"max_streams": 2})
    async with run_service(few, with_worker=False) as running:
        await fill(connection, 1)
        writer = running.services.files.writer("default")
        await writer.write(b"x" * 2_500_000)
        file = await running.services.files.finish("default", writer, FileDetails("batch", "f"))
        download = f"/v1/files/file-{file.id}/content"
        clients = [SlowClient(running, path) for path in ("/results/export", download)]
        assert await until_waiting(running, clients) == clients
        # A megabyte and a prompt of as many bytes, and a part of the file.
        assert running.services.byte_budget.used == 4 * (2 * LONG + 125_000)
        for path in ("/results/export", download):
            refused = await running.client.get(path)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
        await finish(clients)
        assert clients[1].received == file.size
        assert (await running.client.get(download)).content == b"x" * file.size


async def send_to(
    read: Callable[[Message], Awaitable[None]], bodies: Sequence[bytes], *, charged: int
) -> ByteBudget:
    """Send a response in these parts to a client that may stall for 10 ms; the budget at its end."""
    budget = ByteBudget(BUDGET)

    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await charge(charged)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for place, body in enumerate(bodies, 1):
            more = place < len(bodies)
            await send({"type": "http.response.body", "body": body, "more_body": more})

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    state = SimpleNamespace(services=SimpleNamespace(byte_budget=budget))
    scope = {"type": "http", "app": SimpleNamespace(state=state), "principal": ANYONE}
    await asyncio.wait_for(ByteAccounts(answer, 0.01)(scope, receive, read), 20)
    return budget


@pytest.mark.parametrize(
    ("bodies", "received"),
    [([b"x" * LONG], PIECE_BYTES), ([b"x" * 100] * 3, 100)],  # a long text, and a stream
    ids=["long", "stream"],
)
async def test_a_client_that_stops_reading_is_cut_off(
    caplog: pytest.LogCaptureFixture, bodies: Sequence[bytes], received: int
) -> None:
    caplog.set_level("INFO")
    sent: list[Message] = []

    async def read_once(message: Message) -> None:
        if len(sent) == 2:
            await asyncio.Event().wait()
        sent.append(message)

    budget = await send_to(read_once, bodies, charged=LONG)
    assert [len(message.get("body", b"")) for message in sent] == [0, received]
    assert sent[-1]["more_body"], "the body has no end: the client sees that it is cut off"
    assert "client_stalled" in [getattr(record, "action", "") for record in caplog.records]
    assert budget.used == 0


async def test_a_long_body_is_sent_in_pieces_though_it_holds_nothing() -> None:
    """The server would keep what a slow client has not read."""
    sent: list[tuple[int, bool]] = []

    async def read(message: Message) -> None:
        if message["type"] == "http.response.body":
            sent.append((len(message["body"]), message["more_body"]))

    piece = PIECE_BYTES
    bodies = [b"x" * size for size in (2 * piece + 1, 2 * piece, piece + 1, piece, 1)]
    await send_to(read, bodies, charged=0)
    pieces = [piece, piece, 1, piece, piece, piece, 1, piece, 1]
    assert sent == [(size, place < len(pieces)) for place, size in enumerate(pieces, 1)]


async def test_a_slow_client_of_a_request_that_holds_nothing_is_not_cut_off() -> None:
    sent: list[Message] = []

    async def read_slowly(message: Message) -> None:
        await asyncio.sleep(0.05)  # the client is slow
        sent.append(message)

    await send_to(read_slowly, [b"x" * 100] * 2, charged=0)
    assert len(sent) == 3
    assert not sent[-1]["more_body"]


async def test_a_list_of_repeated_requests_has_bounded_texts(
    api: Service, connection: asyncpg.Connection
) -> None:
    """Each item finds a result of a megabyte under its key; a request has half of the budget."""
    ids = await fill(connection, 12)
    items = [{"model": "m", "content": str(n), "idempotency_key": str(n)} for n in range(12)]
    creates = [ResultCreate.model_validate(item) for item in items]
    for one, create in zip(ids, creates, strict=True):
        key = api.services.submissions.replays.key(create)
        assert key is not None
        await connection.execute(
            """INSERT INTO idempotency_keys (team_id, key, request_hash, result_id, expires_at)
            VALUES ('default', $1, $2, $3, now() + interval '1 hour')""",
            *(key.key, key.request_hash, UUID(one)),
        )
    answer = await asyncio.wait_for(api.client.post("/results/", json=items), 60)
    assert answer.status_code == 202
    found = [item for item in answer.json() if item.get("state") == "completed"]
    refused = [item for item in answer.json() if item.get("code") == "memory_busy"]
    assert len(found) + len(refused) == 12
    assert 1 <= len(found) <= BUDGET // 2 // (4 * LONG)
    assert "Send it in parts" in refused[0]["detail"]
