"""/servers: the Triton servers that results run on."""

from fastapi import APIRouter, Request, Response

from app.api.admin.servers_schemas import ServerCreate, ServerRead, server_to_wire
from app.api.container import Services
from app.api.dependencies import ServicesOf
from app.api.json_codec import json_response, parse
from app.api.raw_routes import describe
from app.core.errors import ConflictError
from app.inference.server_pool import Server
from app.inference.server_store import ServerAddress

router = APIRouter(tags=["servers"])

_EXAMPLE = {"name": "gpu-2", "grpc": "10.0.0.2:8001"}


@router.get("/servers", response_model=list[ServerRead])
async def list_servers(services: ServicesOf) -> Response:
    """List the Triton servers: health, models, and how many results run on each."""
    running = await services.server_pool.store.running()
    return json_response(
        [server_to_wire(one, running.get(one.name, 0)) for one in services.server_pool.servers]
    )


@router.post(
    "/servers",
    status_code=201,
    response_model=ServerRead,
    openapi_extra=describe(body=ServerCreate, example=_EXAMPLE),
)
async def register_server(request: Request, services: ServicesOf) -> Response:
    """Register a Triton server: every worker sends it results of its ready models.

    A server that does not respond yet is registered too, and used when it does.
    """
    server = parse(ServerCreate, await request.body())
    for known in services.server_pool.servers:
        if known.address.grpc == server.grpc:
            _check_registered(known)
    await services.server_pool.store.add(ServerAddress(**server.model_dump()))
    answer = await _answer(services, server.name, 201)
    answer.headers["Location"] = str(request.url.path).rstrip("/") + f"/{server.name}"
    return answer


@router.get("/servers/{name}", response_model=ServerRead)
async def read_server(name: str, services: ServicesOf) -> Response:
    """Read one server's health and models."""
    return await _to_response(services, services.server_pool.get(name))


@router.post("/servers/{name}/drain", response_model=ServerRead)
async def drain_server(name: str, services: ServicesOf) -> Response:
    """Send a server no new results; its running results continue to their end."""
    return await _set(services, name, is_draining=True)


@router.post("/servers/{name}/resume", response_model=ServerRead)
async def resume_server(name: str, services: ServicesOf) -> Response:
    """Send results to a drained server again."""
    return await _set(services, name, is_draining=False)


@router.delete("/servers/{name}", status_code=204)
async def remove_server(name: str, services: ServicesOf) -> Response:
    """Remove a server; its running results continue to their end."""
    _check_registered(services.server_pool.find(name))
    await services.server_pool.store.remove(name)
    await services.registry.outdate()
    return Response(status_code=204)


async def _set(services: Services, name: str, *, is_draining: bool) -> Response:
    _check_registered(services.server_pool.find(name))
    await services.server_pool.store.drain(name, is_draining=is_draining)
    return await _answer(services, name)


async def _answer(services: Services, name: str, status: int = 200) -> Response:
    await services.registry.outdate()
    return await _to_response(services, services.server_pool.get(name), status)


async def _to_response(services: Services, server: Server, status: int = 200) -> Response:
    running = await services.server_pool.store.running()
    return json_response(server_to_wire(server, running.get(server.name, 0)), status)


def _check_registered(server: Server | None) -> None:
    if server is not None and server.address.is_static:
        raise ConflictError(
            f"Server {server.name!r} ({server.address.grpc}) is named by TRITON_GRPC_SERVICE: change "
            "the setting, and restart."
        )
