"""/models/: Triton's models; load and unload them."""

from typing import Any

from fastapi import APIRouter, Response

from app.api.dependencies import ServicesOf, TeamOf
from app.api.json_codec import json_response
from app.api.native.schemas import ModelRead
from app.inference.model_registry import Model
from app.queue.depth import ModelLoad

router = APIRouter(tags=["models"])


@router.get("/models/", response_model=list[ModelRead])
async def list_models(services: ServicesOf, team_id: TeamOf) -> Response:
    """List the models that Triton serves, and those that it served before."""
    loads = await services.depth.by_model()
    return json_response(
        [_to_wire(model, loads.get(model.name), team_id) for model in services.registry.all()]
    )


@router.get("/models/{name}", response_model=ModelRead)
async def read_model(name: str, services: ServicesOf, team_id: TeamOf) -> Response:
    """Read one model's readiness, limits and load."""
    model = await services.registry.find(name)
    loads = await services.depth.by_model()
    return json_response(_to_wire(model, loads.get(model.name), team_id))


@router.post("/models/{name}/load", response_model=ModelRead)
async def load_model(name: str, services: ServicesOf, team_id: TeamOf) -> Response:
    """Load a model of the repository on each Triton server; responds when it is loaded."""
    await services.registry.load(name)
    return await read_model(name, services, team_id)


@router.post("/models/{name}/unload", response_model=ModelRead)
async def unload_model(name: str, services: ServicesOf, team_id: TeamOf) -> Response:
    """Unload a model on each Triton server; its queued results wait until it is loaded again."""
    await services.registry.unload(name)
    return await read_model(name, services, team_id)


def _to_wire(model: Model, load: ModelLoad | None, team_id: str) -> dict[str, Any]:
    load = load or ModelLoad()
    return {
        "name": model.name,
        "version": model.version,
        "ready": model.ready,
        "reason": None if model.ready else model.reason,
        "chat": model.has_chat,
        "adapters": model.adapters.of_team(team_id),
        "max_model_len": model.max_model_len,
        "default_parameters": model.format.default_parameters if model.format else None,
        "queued": load.queued,
        "running": load.running,
        "tokens_per_second": round(load.tokens_per_second, 1),
    }
