"""/v1/models by the official clients of Anthropic and OpenAI, unmodified, against a real socket."""

from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import anthropic
import asyncpg
import openai
import orjson
import pytest
from anthropic import AsyncAnthropic

from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, make_settings
from tests.integration.auth.test_auth import guarded
from tests.integration.support import (
    anthropic_client,
    assert_anthropic_error,
    assert_openai_error,
    openai_client,
    serve,
    write_model,
)
from tests.postgres import PostgresServer
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

ADAPTERS = [f"a{number:02}" for number in range(44)]
HIDDEN = "hidden"
NAMES = ["scripted", *(f"scripted:{name}" for name in ADAPTERS)]
VERSION = {"anthropic-version": "2023-06-01"}


def write_repository(folder: Path) -> Path:
    write_model(folder, "scripted", max_model_len=4_096)
    version = folder / "scripted" / "1"
    engine = orjson.loads((version / "model.json").read_bytes()) | {"enable_lora": True}
    (version / "model.json").write_bytes(orjson.dumps(engine))
    files = {name: f"/{name}" for name in [*ADAPTERS, HIDDEN]}
    (version / "multi_lora.json").write_bytes(orjson.dumps(files))
    (version / "adapter_teams.json").write_bytes(orjson.dumps({HIDDEN: ["red"]}))
    return folder


@pytest.fixture
async def served(
    postgres_server: PostgresServer,
    database_name: str,
    connection: asyncpg.Connection,
    triton: EmbeddedTriton,
    tmp_path: Path,
) -> AsyncIterator[Service]:
    """A model with 44 adapters, and an older one that is not ready."""
    await connection.execute(
        "INSERT INTO models (name, version, first_seen_at) VALUES ('gone', 1, '2020-01-01')"
    )
    repository = write_repository(tmp_path)
    settings = make_settings(postgres_server, database_name, triton, model_repository=repository)
    async with serve(settings) as service:
        yield service


@pytest.fixture
async def client(served: Service) -> AsyncIterator[AsyncAnthropic]:
    async with anthropic_client(served) as one:
        yield one


async def test_anthropics_client_lists_the_models(served: Service, client: AsyncAnthropic) -> None:
    assert [model.id async for model in client.models.list()] == NAMES  # three pages
    page = await client.models.list(limit=7)
    assert (len(page.data), page.has_more) == (7, True)
    assert (page.first_id, page.last_id) == (NAMES[0], NAMES[6])
    first = page.data[0]
    assert (first.type, first.id, first.display_name) == ("model", "scripted", "scripted")
    assert (first.lifecycle, first.max_input_tokens, first.max_tokens) == ("active", 4096, 4096)
    assert first.to_dict()["capabilities"] is None  # required: the service does not know them
    assert datetime.now(UTC) - first.created_at < timedelta(hours=1)
    behind = await client.models.list(limit=3, after_id=NAMES[6])
    assert [one.id for one in behind.data] == NAMES[7:10]
    before = await client.models.list(limit=3, before_id=NAMES[6])
    assert ([one.id for one in before.data], before.has_more) == (NAMES[3:6], True)
    every = [model.id async for model in client.models.list(limit=4, before_id=NAMES[11])]
    assert sorted(every) == NAMES[:11]
    assert (await client.models.list(limit=1000)).has_more is False
    assert (await client.models.list(lifecycle=["retired", "deprecated"])).data == []
    assert (await client.models.list(lifecycle=["active", "retired"])).has_more


async def test_anthropics_client_reads_a_model(served: Service, client: AsyncAnthropic) -> None:
    for name in (NAMES[0], NAMES[5]):
        model = await client.models.retrieve(name)
        assert (model.id, model.type, model.max_tokens) == (name, "model", 4096)
    listed = await client.models.list(limit=1)
    assert await client.models.retrieve(NAMES[0]) == listed.data[0]
    with pytest.raises(anthropic.NotFoundError) as caught:
        await client.models.retrieve("scripted/none")
    assert caught.value.body["error"]["details"] == {"error_code": "unknown_model"}  # type: ignore[index]
    assert caught.value.request_id


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=x", "limit=", "limit=%D9%A3", "after_id=x", "before_id=scripted:hidden",
     "after_id=", "lifecycle=new", "lifecycle%5B%5D=active&lifecycle%5B%5D=x"],
)  # fmt: skip
async def test_wrong_queries_of_anthropics_are_refused(served: Service, query: str) -> None:
    answer = await served.client.get(f"/v1/models?{query}", headers=VERSION)
    error = assert_anthropic_error(answer, 400, "invalid_request")
    assert query.partition("=")[0].removesuffix("%5B%5D") in error["message"]
    # They mean nothing to OpenAI's.
    plain = await served.client.get(f"/v1/models?{query}")
    assert len(plain.json()["data"]) == len(NAMES)


async def test_openais_clients_see_their_own_shape(served: Service) -> None:
    async with openai_client(served) as client:
        assert [model.id async for model in client.models.list()] == NAMES
        model = await client.models.retrieve(NAMES[1])
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("none")
    assert (model.object, model.owned_by) == ("model", "llm-api-service")
    answer = await served.client.get("/v1/models", headers={"x-api-key": "none"})
    assert answer.json().keys() == {"object", "data"}
    assert "request-id" not in answer.headers
    one = answer.json()["data"][1]
    assert one.keys() == {"id", "object", "created", "owned_by", "max_model_len", "parent"}
    missing = await served.client.get("/v1/models/none", headers={"x-api-key": "none"})
    assert_openai_error(missing, 404, "model_not_found")


async def test_keys_and_teams(guarded: Settings, tmp_path: Path) -> None:
    repository = write_repository(tmp_path)
    changed = guarded.model_copy(update={"model_repository": repository})
    hidden = f"scripted:{HIDDEN}"
    async with serve(changed) as service:
        url = str(service.client.base_url).rstrip("/")

        def client_of(key: str) -> AsyncAnthropic:
            return AsyncAnthropic(base_url=url, api_key=key, max_retries=0)

        async with client_of("none") as client:
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.models.list()
            assert caught.value.type == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.retrieve("scripted")
        red, blue = (
            sign({"team_id": team, "token_id": team, "scopes": ["use"]}) for team in ("red", "blue")
        )
        async with client_of(red) as client:
            assert hidden in [model.id async for model in client.models.list()]
            assert (await client.models.retrieve(hidden)).id == hidden
            assert (await client.models.list(after_id=hidden)).data == []
        async with client_of(blue) as client:
            assert [model.id async for model in client.models.list()] == NAMES
            with pytest.raises(anthropic.NotFoundError):
                await client.models.retrieve(hidden)
            with pytest.raises(anthropic.BadRequestError, match="after_id"):
                await client.models.list(after_id=hidden)
        foreign = await service.client.get(
            "/v1/models", headers=VERSION | {"x-api-key": red, "Origin": "https://evil.example"}
        )
        assert_anthropic_error(foreign, 403, "forbidden_origin")
