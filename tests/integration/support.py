"""Shared by the tests of the native API and of the queue: servers, conditions, assertions."""

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import orjson
import uvicorn
from anthropic import AsyncAnthropic
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.applications import Starlette
from tokenizers import Tokenizer, models, pre_tokenizers

from app.api.app import create_app
from app.api.connection import Connection
from app.api.container import Services
from app.api.errors import anthropic_errors, openai_errors, tenstorrent_errors, tgi_errors
from app.api.errors.error_responses import dialect_of
from app.cli.up.triton import EmbeddedTriton
from app.core.settings import Settings
from tests.conftest import Service, connect, make_settings
from tests.postgres import PostgresServer

UNKNOWN_ID = "01890000-0000-7000-8000-000000000000"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}"
    "<{{ message.role }}> {{ message.content }} {% endfor %}<assistant>"
)
# It takes tools, their calls and a switch of thinking.
TOOL_TEMPLATE = (
    "{% if tools %}[tools {{ tools | tojson }}] {% endif %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}] {% endif %}"
    "{% for message in messages %}<{{ message.role }}> {{ message.content }} "
    "{% for call in message.tool_calls %}<tool_call> {{ call.function | tojson }} </tool_call> "
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def assert_problem(
    response: httpx.Response, status: int, code: str, field: str | None = None
) -> dict[str, Any]:
    """The answer is a whole RFC 9457 problem with this code, and names this field."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/problem+json"
    problem: dict[str, Any] = orjson.loads(response.content)
    assert problem["status"] == status
    assert problem["code"] == code, problem
    assert problem["type"] == f"/docs/errors#{code}"
    assert problem["title"]
    assert problem["detail"]
    if status == 422:
        assert problem["errors"], problem
        assert all(error["field"] and error["message"] for error in problem["errors"]), problem
    if field is not None:
        assert any(f"{error['field']}.".startswith(f"{field}.") for error in problem["errors"]), (
            problem
        )
    return problem


def assert_openai_error(
    response: httpx.Response, status: int, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """The answer is a whole error of OpenAI's shape, with this code and parameter."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = orjson.loads(response.content)
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"]
    assert code is None or error["code"] == code, error
    assert param is None or error["param"] == param, error
    return error


def assert_refusal(path: str, answer: httpx.Response, status: int, code: str | None = None) -> None:
    """The answer is an error in the shape of the path's dialect."""
    dialect = dialect_of(path.split("?")[0])
    if dialect in tgi_errors.SEGMENTS and status == 401:
        assert (answer.status_code, answer.content) == (401, b"")
    elif dialect in tgi_errors.SEGMENTS:
        assert answer.status_code == status
        assert set(answer.json()) == {"error", "error_type"}
        assert code in (None, answer.json()["error_type"])
    elif dialect == tgi_errors.FIRST_SEGMENT:
        assert answer.status_code == (400 if status == 422 else status)
        assert set(answer.json()) == {"error"}
    elif dialect == tenstorrent_errors.SEGMENT:
        status = 400 if code == "invalid_token" else status
        assert answer.status_code == status
        assert set(answer.json()) == {"status_code", "message"}
        assert answer.json()["status_code"] == status
    elif dialect == anthropic_errors.PATH:
        assert_anthropic_error(answer, {422: 400, 503: 529}.get(status, status), code)
    elif dialect in ("v1", *openai_errors.SEGMENTS):
        assert_openai_error(answer, status, "invalid_api_key" if status == 401 else code)
    else:
        assert_problem(answer, status, code or answer.json()["code"])


async def until(condition: Callable[[], Awaitable[object]], seconds: float = 30.0) -> Any:
    """The first true answer of `condition`; fails when there is none in time."""
    began = asyncio.get_running_loop().time()
    while True:
        answer = await condition()
        if answer:
            return answer
        passed = asyncio.get_running_loop().time() - began
        assert passed < seconds, f"{condition} stayed false"
        # The longer it takes, the less often: a question costs as much as a small result.
        await asyncio.sleep(min(0.1, max(0.02, passed / 20)))


async def send(service: Service, content: str, **members: object) -> dict[str, Any]:
    """Send a prompt to the scripted model; the accepted result."""
    answer = await service.client.post(
        "/results/", json={"model": "scripted", "content": content} | members
    )
    assert answer.status_code == 202, answer.text
    accepted: dict[str, Any] = answer.json()
    return accepted


async def read(service: Service, result_id: str, **query: str | float | bool) -> dict[str, Any]:
    """A result as it stands, or after `wait`."""
    answer = await service.client.get(f"/results/{result_id}", params=query)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


async def finish(service: Service, content: str, **members: object) -> dict[str, Any]:
    """Send a prompt and wait for its terminal state."""
    accepted = await send(service, content, **members)
    result = await read(service, accepted["id"], wait=30)
    assert result["state"] != "pending", result
    return result


async def until_running(service: Service, result_id: str) -> dict[str, Any]:
    """The result once a worker has it and its text has begun to be stored."""

    async def has_text() -> dict[str, Any] | None:
        result = await read(service, result_id, partial=True)
        return result if result["result"] else None

    found: dict[str, Any] = await until(has_text)
    return found


def write_model(
    repository: Path,
    name: str,
    *,
    max_model_len: int | None = None,
    template: str | None = None,
    tokenizer: bool = True,
) -> None:
    """A repository entry whose tokenizer counts words: one token each."""
    version = repository / name / "1"
    version.mkdir(parents=True)
    engine: dict[str, Any] = {"model": f"models/{name}/1"}
    if max_model_len is not None:
        engine["max_model_len"] = max_model_len
    (version / "model.json").write_bytes(orjson.dumps(engine))
    (version / "config.json").write_text('{"max_position_embeddings": 4096}')
    if tokenizer:
        words = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
        words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        words.save(str(version / "tokenizer.json"))
    if template is not None:
        (version / "chat_template.jinja").write_text(template)


@contextlib.asynccontextmanager
async def fresh_database(
    server: PostgresServer, template: str, triton: EmbeddedTriton | None, **changes: object
) -> AsyncIterator[Settings]:
    """Settings on a database of their own, for fixtures wider than one test."""
    name = f"test_{secrets.token_hex(6)}"
    await server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield make_settings(server, name, triton, **changes)
    await server.execute(f"DROP DATABASE {name} WITH (FORCE)")


class _Server(uvicorn.Server):
    """A server inside the test's loop: signals stay pytest's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def serve(settings: Settings, *, with_worker: bool = False) -> AsyncIterator[Service]:
    """The API behind a real socket, as `python -m app serve` has it."""
    app: FastAPI = create_app(settings, with_worker=with_worker)
    async with serve_app(app) as url:
        services: Services = app.state.services
        await services.registry.refresh()
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            yield Service(client, services, app)


@contextlib.asynccontextmanager
async def serve_app(app: Starlette) -> AsyncIterator[str]:
    """An application behind a real socket of 127.0.0.1; its address."""
    server = _Server(
        uvicorn.Config(
            app,
            host="127.0.0.1",
            port=0,
            http=Connection,
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="on",
            timeout_graceful_shutdown=5,
        )
    )
    serving = asyncio.create_task(server.serve())

    async def is_started() -> bool:
        return server.started or serving.done()

    await until(is_started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


async def count_rows(connection: asyncpg.Connection) -> tuple[int, ...]:
    """The number of rows of each table that requests write to."""
    row = await connection.fetchrow(
        """SELECT (SELECT count(*) FROM contexts), (SELECT count(*) FROM results),
                  (SELECT count(*) FROM result_chunks)"""
    )
    assert row is not None
    return tuple(row)


__all__ = [
    "CHAT_TEMPLATE",
    "TOOL_TEMPLATE",
    "UNKNOWN_ID",
    "assert_openai_error",
    "assert_problem",
    "assert_refusal",
    "connect",
    "count_rows",
    "finish",
    "fresh_database",
    "read",
    "send",
    "serve",
    "serve_app",
    "until",
    "until_running",
    "write_model",
]


def openai_client(service: Service) -> AsyncOpenAI:
    """The official client; it does not try again, so that each answer is seen."""
    return AsyncOpenAI(
        base_url=f"{str(service.client.base_url).rstrip('/')}/v1", api_key="none", max_retries=0
    )


def anthropic_client(service: Service) -> AsyncAnthropic:
    """The official client; it does not try again, so that each answer is seen."""
    return AsyncAnthropic(
        base_url=str(service.client.base_url).rstrip("/"), api_key="none", max_retries=0
    )


def assert_anthropic_error(
    response: httpx.Response, status: int, code: str | None = None
) -> dict[str, Any]:
    """The answer is a whole error of Anthropic's shape, with this code of ours."""
    assert response.status_code == status, (response.status_code, response.text[:500])
    body: dict[str, Any] = orjson.loads(response.content)
    assert body.keys() == {"type", "error", "request_id"}
    assert (body["type"], body["request_id"]) == ("error", response.headers["request-id"])
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"type", "message", "details"}
    assert error["message"]
    assert code in (None, error["details"]["error_code"]), error
    return error
