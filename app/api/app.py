"""FastAPI application: lifespan, middleware, routes, error handlers and OpenAPI document."""

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi_offline import FastAPIOffline
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse

from app import __version__
from app.api import health, model_lists
from app.api.admin import launches, model_downloads, servers
from app.api.anthropic import batches_router as anthropic_batches, router as anthropic
from app.api.batch_dialects import batch_services
from app.api.container import background, new_worker, open_services
from app.api.errors import (
    anthropic_errors,
    error_responses,
    openai_errors,
    tenstorrent_errors,
    tgi_errors,
)
from app.api.infini_gram import router as infini_gram
from app.api.json_codec import JSON, PROBLEM_JSON
from app.api.middleware.access import needed_scope
from app.api.middleware.authentication import AuthenticationMiddleware
from app.api.middleware.byte_accounts import ByteAccounts
from app.api.middleware.fair_turns import FairTurns
from app.api.middleware.request_guard import RequestGuard
from app.api.middleware.request_id import RequestIdMiddleware
from app.api.middleware.served_as import ServedAs
from app.api.native import (
    attributions,
    contexts,
    create_results,
    exports,
    history,
    jobs,
    me,
    models,
    results,
    streams,
    usage,
    webhooks,
)
from app.api.native.schemas import ProblemRead
from app.api.openai import (
    batches_router as openai_batches,
    embeddings_router as openai_embeddings,
    files_router as openai_files,
    responses_router as openai_responses,
    router as openai,
)
from app.api.openai.schemas import OpenAIErrorRead
from app.api.pooling import router as pooling
from app.api.raw_routes import REFERENCED, RawRoutes, reference
from app.api.tenstorrent import router as tenstorrent
from app.api.tgi import first_version as tgi_first, router as tgi
from app.batches.processor import BatchProcessor
from app.core.errors import ServiceError
from app.core.fair_share import FairShares
from app.core.program import ROOT
from app.core.settings import Settings
from app.core.tracing import tracing

logger = logging.getLogger(__name__)

_DESCRIPTION = """Durable results in front of NVIDIA Triton.

Save a prompt (a *context*), send it to a model and have a *result* id at once. The result is
`pending`, then `completed` or `failed`, even if processes die in between. Errors are RFC 9457
problems."""

_ERROR_CATALOGUE = ROOT / "docs" / "errors.md"

# Modules with raw routes, which bypass FastAPI.
_RAW = (
    *(results, create_results, streams, contexts),
    *(openai, openai_responses, openai_embeddings, pooling, anthropic, tgi),
    *(tgi_first, tenstorrent),
)
# Their first segment is any name: last, so that they shadow no other path.
_OF_INDEXES = (attributions, infini_gram)
_ROUTED = (
    *(results, create_results, streams, contexts, models, servers, webhooks, tgi, me),
    *(
        model_downloads,  # before the launches, whose ids are any segment
        launches,
        jobs,
        history,
        usage,
        model_lists,
        openai_responses,
        openai_files,
        openai_batches,
        anthropic_batches,
    ),
)


def _error(description: str, schema: dict[str, Any], media_type: str = JSON) -> dict[str, Any]:
    return {"description": description, "content": {media_type: {"schema": schema}}}


_PROBLEM = _error(
    "A problem (RFC 9457): `code` for programs, `detail` for people.",
    reference(ProblemRead),
    PROBLEM_JSON,
)
# The dialects' errors; other paths return problems.
_ERRORS = {
    **dict.fromkeys(
        ("v1", *openai_errors.SEGMENTS),
        _error("An error in OpenAI's shape.", reference(OpenAIErrorRead)),
    ),
    "rerank": _error(
        "An error in OpenAI's shape; in TEI's for a request with `texts`.",
        {"anyOf": [reference(OpenAIErrorRead), tgi_errors.SCHEMA]},
    ),
    anthropic_errors.PATH: _error("An error in Anthropic's shape.", anthropic_errors.SCHEMA),
    anthropic_errors.MODELS: _error(
        "An error in OpenAI's shape; with `anthropic-version` in Anthropic's.",
        {"anyOf": [reference(OpenAIErrorRead), anthropic_errors.SCHEMA]},
    ),
    **dict.fromkeys(tgi_errors.SEGMENTS, _error("TGI's error.", tgi_errors.SCHEMA)),
    tgi_errors.FIRST_SEGMENT: _error("TGI's first error.", tgi_errors.FIRST_SCHEMA),
    tenstorrent_errors.SEGMENT: _error("Tenstorrent's error.", tenstorrent_errors.SCHEMA),
}


def create_app(settings: Settings, *, with_worker: bool = False) -> FastAPI:
    """Build the API; `with_worker` runs a worker inside the process as well."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with (
            tracing(settings.otlp_endpoint, "llm-api"),
            open_services(settings, "api") as services,
            services.indexes,
        ):
            app.state.services = services
            shares = FairShares(settings.database_pool_size) if settings.is_authenticated else None
            app.state.fair_shares = shares
            services.hub.subscribe(services.listener)
            services.authenticator.subscribe(services.listener)
            loop = asyncio.get_running_loop()
            app.state.stop = lambda: loop.call_soon_threadsafe(services.hub.close)
            worker = feeder = None
            if with_worker:
                worker = new_worker(services)
                feeder = BatchProcessor(batch_services(services))
            async with background(services, feeder) as tasks:
                tasks.append(asyncio.create_task(services.hub.run(), name="stream hub"))
                tasks.append(
                    asyncio.create_task(services.authenticator.run(), name="authentication")
                )
                if worker:
                    tasks.append(asyncio.create_task(worker.run(), name="worker"))
                for task in tasks:
                    task.add_done_callback(_stop_process_on_death)
                yield
                services.hub.close()
                if shares:
                    shares.close()
                if worker:
                    worker.stop()
                    await tasks[-1]

    # The documentation page brings its own assets: it works without the internet.
    app = FastAPIOffline(
        docs_url="/docs",
        redoc_url=None,
        title="LLM API Service",
        version=__version__,
        description=_DESCRIPTION,
        lifespan=lifespan,
        # Unused; the check for its configuration would read the environment on every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    _add_middleware(app, settings)
    app.add_exception_handler(ServiceError, error_responses.on_service_error)
    app.add_exception_handler(RequestValidationError, error_responses.on_validation_error)
    app.add_exception_handler(HTTPException, error_responses.on_http_error)
    app.add_exception_handler(Exception, error_responses.on_unexpected_error)
    app.include_router(exports.router)
    for routes in _RAW:
        app.include_router(routes.raw)
    for routes in _ROUTED:
        app.include_router(routes.router)
    app.include_router(health.router)
    app.add_api_route("/docs/errors", _read_errors, include_in_schema=False)
    for routes in _OF_INDEXES:
        app.include_router(routes.router)
        app.include_router(routes.raw)
    app.openapi = lambda: _openapi(app, settings)  # type: ignore[method-assign] # FastAPI's own extension point
    return app


def _add_middleware(app: FastAPI, settings: Settings) -> None:
    """The innermost first."""
    app.add_middleware(
        RawRoutes,
        routes=[route for module in (*_RAW, *_OF_INDEXES) for route in module.raw.routes],
        others=[exports.PATH],
    )
    app.add_middleware(
        RequestGuard,
        allowed_hosts=settings.hosts_to_check,
        local_clients=None if settings.is_authenticated else settings.local_clients,
        max_body_bytes=settings.max_body_bytes,
        uploads={openai_files.UPLOADS: settings.max_file_bytes + openai_files.FORM_BYTES},
    )
    app.add_middleware(ByteAccounts)
    app.add_middleware(FairTurns)
    app.add_middleware(
        AuthenticationMiddleware,
        is_on=settings.is_authenticated,
        auth_failures_per_minute=settings.auth_failures_per_minute,
    )
    app.add_middleware(RequestIdMiddleware)
    if settings.tgi_generate == "first":
        app.add_middleware(ServedAs, paths={"/generate": tgi_first.PATH})


def _openapi(app: FastAPI, settings: Settings) -> dict[str, Any]:
    """The OpenAPI document, with the schemas that raw routes refer to and each dialect's errors."""
    if app.openapi_schema is None:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, definitions = models_json_schema(
            [(model, "validation") for model in REFERENCED],
            ref_template="#/components/schemas/{model}",
        )
        schemas = document.setdefault("components", {}).setdefault("schemas", {})
        schemas.update(definitions["$defs"])
        for path, operations in document["paths"].items():
            for operation in operations.values():
                # FastAPI documents its own 422 body, which is not ours.
                operation["responses"].pop("422", None)
                dialect = error_responses.dialect_of(path)
                if anthropic_errors.is_of_models(path):
                    dialect = anthropic_errors.MODELS
                operation["responses"]["default"] = _ERRORS.get(dialect, _PROBLEM)
                if dialect in tgi_errors.SEGMENTS:
                    operation["responses"]["401"] = {"description": "No valid token; no body."}
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        parameters = schemas["SamplingParameters"]["properties"]
        parameters["max_tokens"]["default"] = settings.default_max_tokens
        if settings.is_authenticated:
            _describe_security(document)
        app.openapi_schema = document
    return app.openapi_schema


def _describe_security(document: dict[str, Any]) -> None:
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a JWT."},
        "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            needed = needed_scope(method.upper(), path, b"")
            operation["security"] = [] if needed is None else [{"bearer": [needed]}]
            if anthropic_errors.is_path(path) or anthropic_errors.is_of_models(path):
                operation["security"].append({"x-api-key": []})


async def _read_errors() -> FileResponse:
    """The catalogue of error codes, to which the `type` of every problem links."""
    return FileResponse(_ERROR_CATALOGUE, media_type="text/plain; charset=utf-8")


def _stop_process_on_death(task: asyncio.Task[None]) -> None:
    """Stop the process, so that it does not look alive without the task."""
    if task.cancelled():
        return
    error = task.exception()
    if error is not None:
        logger.critical("%s died; stopping the process", task.get_name(), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)
