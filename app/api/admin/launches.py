"""/launches: Triton servers that are started, followed and stopped by the service."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response

from app.api.admin.launches_schemas import (
    DryRunRead,
    EngineOptionsRead,
    LaunchRead,
    LogRead,
    ProfileRead,
    engine_options_to_wire,
    launch_to_wire,
    profile_to_wire,
)
from app.api.admin.plan_schemas import EXAMPLE, PlanRead
from app.api.container import Services
from app.api.dependencies import ServicesOf, TeamOf, to_id
from app.api.json_codec import json_response, parse
from app.api.pagination import After, Limit, last_of_full, page_response
from app.api.raw_routes import describe
from app.core.errors import ConflictError
from app.core.ids import new_id
from app.provisioning.catalogue import CatalogueEntry, read_catalogue
from app.provisioning.job_script import ModelPlace, engine_settings, render_script
from app.provisioning.model_plan import PlanCreate, plan_model
from app.provisioning.profiles import ProfileError
from app.provisioning.spec import LaunchCreate, to_spec
from app.provisioning.store import State

router = APIRouter(tags=["launches"])

DryRun = Annotated[bool, Query(description="Show what would be launched, and its script.")]


@router.post(
    "/launches",
    status_code=202,
    response_model=LaunchRead,
    responses={200: {"model": DryRunRead, "description": "A dry run."}},
    openapi_extra=describe(
        body=LaunchCreate, example={"name": "qwen", "model": "Qwen/Qwen2.5-7B-Instruct"}
    ),
)
async def create_launch(
    request: Request, services: ServicesOf, team: TeamOf, dry_run: DryRun = False
) -> Response:
    """Launch a Triton server for a model; the service follows it until its job ends."""
    create = parse(LaunchCreate, await request.body())
    spec = await asyncio.to_thread(lambda: to_spec(create, services.profiles, _catalogue(services)))
    profile = services.profiles[spec.profile]
    if dry_run:
        script = render_script(new_id(), spec, profile)
        arguments = engine_settings(spec, ModelPlace())
        return json_response({"spec": spec.model_dump(), "script": script, "model_json": arguments})
    launch = await services.launches.create(team, profile.provider, spec)
    return json_response(
        launch_to_wire(launch), 202, headers={"Location": f"/launches/{launch.id}"}
    )


@router.get("/launches", response_model=list[LaunchRead])
async def list_launches(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    state: State | None = None,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """List the launches, the newest first."""
    launches = await services.launches.list(team, state=state, after=after, limit=limit)
    items = [launch_to_wire(launch) for launch in launches]
    return await page_response(request, items, last_of_full(items, limit))


@router.get("/launches/catalogue", response_model=list[CatalogueEntry])
async def list_catalogue(services: ServicesOf) -> Response:
    """List the models that the operator offers."""
    return json_response([one.model_dump() for one in _catalogue(services).values()])


@router.get("/launches/profiles", response_model=list[ProfileRead])
async def list_profiles(services: ServicesOf) -> Response:
    """List the places where servers can be launched."""
    return json_response([profile_to_wire(one) for one in services.profiles.values()])


@router.get("/launches/engine-options", response_model=EngineOptionsRead)
async def list_engine_options() -> Response:
    """List the options of vLLM's engine: their types, and who may set them."""
    return json_response(engine_options_to_wire())


@router.post(
    "/launches/plan",
    response_model=PlanRead,
    openapi_extra=describe(body=PlanCreate, example=EXAMPLE),
)
async def plan_launch(request: Request, services: ServicesOf) -> Response:
    """Calculate which GPUs fit a model and the resources to request; stores and starts nothing."""
    create = parse(PlanCreate, await request.body())
    plan = await asyncio.to_thread(
        lambda: plan_model(create, services.profiles, _catalogue(services))
    )
    return json_response(plan)


@router.get("/launches/{launch_id}", response_model=LaunchRead)
async def read_launch(launch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read one launch."""
    launch = await services.launches.get(team, to_id(launch_id, "launch"))
    return json_response(launch_to_wire(launch))


@router.get("/launches/{launch_id}/log", response_model=LogRead)
async def read_launch_log(launch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read the end of the job's output."""
    log = await services.launches.log(team, to_id(launch_id, "launch"))
    return json_response({"log": log})


@router.post("/launches/{launch_id}/stop", status_code=202, response_model=LaunchRead)
async def stop_launch(launch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Stop a launch: drain its server, then end its job. An ended launch stays unchanged."""
    launch = await services.launches.stop(team, to_id(launch_id, "launch"))
    return json_response(launch_to_wire(launch), 202)


@router.delete("/launches/{launch_id}", status_code=204)
async def delete_launch(launch_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Delete a launch that has ended."""
    await services.launches.delete(team, to_id(launch_id, "launch"))
    return Response(status_code=204)


def _catalogue(services: Services) -> dict[str, CatalogueEntry]:
    try:
        return read_catalogue(services.settings.catalogue_file)
    except ProfileError as error:
        raise ConflictError(f"The operator's catalogue cannot be read: {error}.") from error
