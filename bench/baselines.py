"""What the HTTP side is held against: the least that each job needs, on the same HTTP server.

A program with six Starlette routes and no middleware: validate only, a fixed answer, a fixed chat
completion, a fixed generation, one INSERT per request, one SELECT per poll. Bodies and answers have the service's own schemas.
"""

import contextlib
from collections.abc import AsyncIterator
from uuid import UUID

import asyncpg
import orjson
import uvicorn
from pydantic import TypeAdapter
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.core.ids import new_id
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.queue.job_queue import NewResult
from app.results.requests import SendOptions
from app.results.serialization import accepted_to_wire, result_to_wire

_CONNECTIONS = 16
_JSON = "application/json"
_SEND = TypeAdapter(SendOptions)
_FIXED = b'{"state":"completed","result":"' + b"word " * 60 + b'"}'
_COMPLETION = orjson.dumps(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "zephyr-e71f3f"},
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 4, "completion_tokens": 1, "total_tokens": 5},
    }
)
GENERATED = "amber basil cedar"
_GENERATION = orjson.dumps({"generated_text": GENERATED})
_INSERT = """
INSERT INTO results (id, team_id, context_id, model_name, parameters, deadline_at)
VALUES ($1, $2, $3, $4, $5::jsonb, now() + interval '1 day')
"""


async def validate(request: Request) -> Response:
    """Read and validate the body; answer the accepted shape, stored nowhere."""
    result = _to_result(await request.body(), request.path_params["context_id"])
    return _json(accepted_to_wire(result, model_ready=True), 202)


async def insert(request: Request) -> Response:
    """The same, with one INSERT and one commit for this request alone."""
    result = _to_result(await request.body(), request.path_params["context_id"])
    async with _pool(request).acquire() as connection:
        await connection.execute(
            _INSERT,
            result.id,
            result.team_id,
            result.context_id,
            result.model_name,
            result.parameters,
        )
    return _json(accepted_to_wire(result, model_ready=True), 202)


async def fixed(_request: Request) -> Response:
    """An answer that is there already."""
    return Response(_FIXED, media_type=_JSON)


async def complete(_request: Request) -> Response:
    """A chat completion that is there already: the upstream of a proxy."""
    return Response(_COMPLETION, media_type=_JSON)


async def generate(_request: Request) -> Response:
    """A generation in TGI's shape that is there already."""
    return Response(_GENERATION, media_type=_JSON)


async def select(request: Request) -> Response:
    """One result, by a SELECT for this request alone."""
    result_id = UUID(request.path_params["result_id"])
    async with _pool(request).acquire() as connection:
        row = await connection.fetchrow("SELECT * FROM results WHERE id = $1", result_id)
    assert row is not None
    return _json(result_to_wire(row, model_ready=True))


def _to_result(body: bytes, context_id: str) -> NewResult:
    options = _SEND.validate_json(body)
    parameters = options.parameters.to_stored(options.parameters.max_tokens or 16)
    return NewResult(
        id=new_id(),
        team_id=DEFAULT_TEAM,
        context_id=UUID(context_id),
        model_name="scripted",
        parameters=orjson.dumps(parameters).decode(),
        deadline_seconds=86_400.0,
    )


def _json(content: object, status: int = 200) -> Response:
    return Response(orjson.dumps(content), status, media_type=_JSON)


def _pool(request: Request) -> asyncpg.Pool:
    pool: asyncpg.Pool = request.app.state.pool
    return pool


@contextlib.asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    settings = Settings()
    ((host, port),) = settings.database_addresses()
    async with asyncpg.create_pool(
        host=host,
        port=port,
        user=settings.database_user,
        password=settings.database_password.get_secret_value(),
        database=settings.database_name,
        min_size=_CONNECTIONS,
        max_size=_CONNECTIONS,
        reset=_keep,
    ) as pool:
        app.state.pool = pool
        yield


async def _keep(_connection: asyncpg.Connection) -> None:
    """No reset between borrowers, as in the service."""


def serve() -> None:
    """Serve until SIGTERM, with the service's own server settings."""
    settings = Settings()
    routes = [
        Route("/validate/{context_id}", validate, methods=["POST"]),
        Route("/insert/{context_id}", insert, methods=["POST"]),
        Route("/fixed", fixed),
        Route("/v1/chat/completions", complete, methods=["POST"]),
        Route("/generate", generate, methods=["POST"]),
        Route("/select/{result_id}", select),
    ]
    uvicorn.run(
        Starlette(routes=routes, lifespan=_lifespan),
        host=settings.host,
        port=settings.port,
        loop="uvloop",
        http="httptools",
        ws="none",
        access_log=False,
        server_header=False,
        log_config=None,
    )


if __name__ == "__main__":
    serve()
