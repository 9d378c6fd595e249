"""/v1/files: uploads that are streamed into parts, and what the door does about them."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import asyncpg
import httpx
import openai
import pytest

from app.core.settings import Settings
from tests.conftest import Service
from tests.integration.support import assert_openai_error, openai_client, serve, until

CONTENT = b'{"custom_id": "a"}\n'


@pytest.fixture
async def running(settings: Settings) -> AsyncIterator[Service]:
    async with serve(settings) as service:
        yield service


@pytest.fixture
async def client(running: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(running) as one:
        yield one


async def test_a_file_comes_back_as_it_was_sent(
    client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    content = secrets.token_bytes(3_300_000)  # no text, and no whole number of parts
    file = await client.files.create(file=("dir/a b.jsonl", content), purpose="batch")
    assert file.id.startswith("file-")
    assert (file.object, file.bytes, file.purpose) == ("file", len(content), "batch")
    assert file.filename == "a b.jsonl"
    assert (await client.files.retrieve(file.id)) == file
    answer = await client.files.content(file.id)
    assert answer.content == content
    assert await connection.fetchval("SELECT count(*) FROM file_parts") == 4
    assert (await client.files.list()).data == [file]
    deleted = await client.files.delete(file.id)
    assert deleted.deleted
    assert await connection.fetchval("SELECT count(*) FROM file_parts") == 0
    for call in (
        client.files.retrieve(file.id),
        client.files.content(file.id),
        client.files.delete(file.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call


async def test_files_are_listed_in_pages_and_by_purpose(client: openai.AsyncOpenAI) -> None:
    made = [await client.files.create(file=("f", CONTENT), purpose="batch") for _ in range(5)]
    ids = [file.id for file in made]
    assert [file.id async for file in client.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in client.files.list(limit=2, order="asc")] == ids
    assert (await client.files.list(purpose="other")).data == []
    assert len((await client.files.list(purpose="batch")).data) == 5


async def test_a_file_that_expires_is_gone(
    running: Service, client: openai.AsyncOpenAI, connection: asyncpg.Connection
) -> None:
    file = await client.files.create(
        file=("f", CONTENT),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at
    assert abs(file.expires_at - file.created_at - 3600) <= 1
    await connection.execute("UPDATE files SET expires_at = now() - interval '1 s'")
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(file.id)
    # And what an upload has left that broke off long ago.
    await connection.execute(
        "INSERT INTO files (id, team_id, purpose, filename)"
        " VALUES ('01890000-0000-7000-8000-000000000000', 'default', '', '')"
    )
    await running.services.files.remove_expired()
    assert await connection.fetchval("SELECT count(*) FROM files") == 0
    assert await connection.fetchval("SELECT count(*) FROM file_parts") == 0


@pytest.mark.parametrize(
    ("data", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "5"}, "expires_after.seconds"),
        ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after.anchor"),
        ({"purpose": "x" * 5000}, "purpose"),
    ],
)
async def test_uploads_that_are_not_supported_are_refused_by_name(
    running: Service, connection: asyncpg.Connection, data: dict[str, str], param: str
) -> None:
    answer = await running.client.post("/v1/files", data=data, files={"file": CONTENT})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert await connection.fetchval("SELECT count(*) FROM files") == 0


async def test_a_form_without_a_file_or_an_end_is_refused(
    running: Service, connection: asyncpg.Connection
) -> None:
    form = {"content-type": "multipart/form-data; boundary=b"}
    whole = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'
    cut = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nsome'
    for body in (whole, cut, b"", b"no form"):
        answer = await running.client.post("/v1/files", content=body, headers=form)
        assert answer.status_code == 400, answer.text
    answer = await running.client.post(
        "/v1/files", content=whole, headers={"content-type": "multipart/form-data"}
    )
    assert answer.status_code == 415
    answer = await running.client.post("/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 415
    assert await connection.fetchval("SELECT count(*) FROM files") == 0


async def test_a_file_that_is_too_large_is_refused(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    small = settings.model_copy(update={"max_file_bytes": 2_500_000})
    async with serve(small) as service, openai_client(service) as client:
        largest = await client.files.create(file=("f", b"x" * 2_500_000), purpose="batch")
        await client.files.delete(largest.id)
        with pytest.raises(openai.APIStatusError) as refused:
            await client.files.create(file=("f", b"x" * 2_600_000), purpose="batch")
        assert refused.value.status_code == 413

        async def endless() -> AsyncIterator[bytes]:
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
            for _ in range(30):
                yield b"x" * 100_000

        answer = await service.client.post(
            "/v1/files",
            content=endless(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )
        assert answer.status_code == 413
    assert await connection.fetchval("SELECT count(*) FROM files") == 0


async def test_a_page_of_another_site_cannot_send_a_form(settings: Settings) -> None:
    """A form needs no leave to cross sites: the origin decides, also where any host is allowed."""
    for hosts in (settings.allowed_hosts, ["*"]):
        async with serve(settings.model_copy(update={"allowed_hosts": hosts})) as service:
            own = str(service.client.base_url).rstrip("/")
            for origin, status in (
                ("https://evil.example", 403),
                ("null", 403),
                ("http://127.0.0.1:1", 403),
                (own, 200),
            ):
                answer = await service.client.post(
                    "/v1/files",
                    data={"purpose": "batch"},
                    files={"file": CONTENT},
                    headers={"origin": origin},
                )
                assert answer.status_code == status, (hosts, origin, answer.text)


async def test_forms_are_taken_nowhere_else(running: Service) -> None:
    for path in ("/v1/batches", "/contexts/", "/v1/files/"):
        answer = await running.client.post(path, files={"file": CONTENT})
        assert answer.status_code == 415, path


async def test_a_client_that_leaves_in_mid_upload_leaves_nothing(
    running: Service, connection: asyncpg.Connection
) -> None:
    async def broken() -> AsyncIterator[bytes]:
        yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(15):
            yield b"x" * 100_000
        raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        await running.client.post(
            "/v1/files",
            content=broken(),
            headers={"content-type": "multipart/form-data; boundary=b"},
        )

    async def is_clean() -> bool:
        return not await connection.fetchval("SELECT count(*) FROM files")

    await until(is_clean)


async def test_the_files_of_a_team_have_only_so_much_room(
    settings: Settings, connection: asyncpg.Connection
) -> None:
    settings = settings.model_copy(update={"team_max_file_bytes": 2_000})

    async def upload(api: Service, size: int) -> httpx.Response:
        files = {"file": ("f", b"x" * size)}
        return await api.client.post("/v1/files", files=files, data={"purpose": "batch"})

    async with serve(settings) as one, serve(settings) as other:
        answers = await asyncio.gather(*(upload(api, 600) for api in (one, other) * 4))
        assert sorted(answer.status_code for answer in answers) == [200] * 3 + [400] * 5
        refused = next(answer for answer in answers if answer.status_code == 400)
        error = assert_openai_error(refused, 400, "storage_full")
        assert error["type"] == "invalid_request_error"
        assert "1800 bytes, of 2000" in error["message"]
        # A refused upload leaves nothing.
        assert await connection.fetchval("SELECT count(*) FROM file_parts") == 3
        # A smaller one has room yet; what another team has does not count.
        assert (await upload(one, 200)).status_code == 200
        assert_openai_error(await upload(one, 0), 400, "storage_full")
        await connection.execute("UPDATE files SET team_id = 'blue' WHERE size = 600")
        assert (await upload(one, 600)).status_code == 200
