"""/contexts/: save, list, read and delete prompts."""

from fastapi import APIRouter, Request, Response

from app.api.dependencies import Force, ServicesOf, TeamOf, services_of, team_of, to_id
from app.api.json_codec import json_response, parse
from app.api.native.schemas import ContextRead
from app.api.pagination import After, Limit, page_response
from app.api.raw_routes import body_of, describe
from app.core.fair_share import in_turns
from app.results.contexts import plain_messages, to_new_context
from app.results.requests import ContextCreate
from app.results.serialization import context_to_wire

router = APIRouter(tags=["contexts"])
raw = APIRouter(tags=["contexts"])

_EXAMPLE = {"content": "def fibonacci(n):", "metadata": {"origin": "example"}}


@raw.post(
    "/contexts/",
    status_code=201,
    responses={201: {"model": ContextRead}},
    openapi_extra=describe(body=ContextCreate, example=_EXAMPLE),
)
async def create_context(request: Request) -> Response:
    """Save a prompt: `content`, or chat `messages`."""
    create = parse(ContextCreate, await body_of(request))
    services, team = services_of(request), team_of(request)
    messages = None
    if create.messages is not None:
        messages = await services.images.fetched(team, plain_messages(create.messages))
    stored = await services.contexts.create(to_new_context(team, create, messages))
    return json_response(context_to_wire(stored), 201, {"Location": f"/contexts/{stored.id}"})


@router.get("/contexts/", response_model=list[ContextRead])
async def list_contexts(
    request: Request, services: ServicesOf, team: TeamOf, limit: Limit = 50, after: After = None
) -> Response:
    """List saved prompts, newest first. A page ends by its bytes, too: `Link` has the next."""
    page = await services.contexts.list(team, after, limit)
    items = [context_to_wire(one) async for one in in_turns(page.rows)]
    return await page_response(request, items, page.following)


@router.get("/contexts/{context_id}", response_model=ContextRead)
async def read_context(context_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read one saved prompt."""
    context = await services.contexts.get(team, to_id(context_id, "context"))
    return json_response(context_to_wire(context))


@router.delete("/contexts/{context_id}", status_code=204)
async def delete_context(
    context_id: str, services: ServicesOf, team: TeamOf, force: Force = False
) -> Response:
    """Delete a prompt with its results; 409 while one is pending, unless `force`."""
    await services.contexts.delete(team, to_id(context_id, "context"), force=force)
    return Response(status_code=204)
