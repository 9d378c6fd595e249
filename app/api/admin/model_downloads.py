"""/launches/downloads: Hugging Face models for the caches of profiles' hosts."""

from fastapi import APIRouter, Request, Response

from app.api.admin.model_downloads_schemas import (
    ModelDownloadCreate,
    ModelDownloadRead,
    download_to_wire,
)
from app.api.dependencies import ServicesOf, TeamOf, to_id
from app.api.json_codec import json_response, parse
from app.api.pagination import After, Limit, last_of_full, page_response
from app.api.raw_routes import describe
from app.core.errors import invalid_field
from app.provisioning.profiles import Profile, find_profile, no_such_profile

router = APIRouter(tags=["launches"])


@router.post(
    "/launches/downloads",
    status_code=202,
    response_model=ModelDownloadRead,
    openapi_extra=describe(body=ModelDownloadCreate, example={"model": "Qwen/Qwen2.5-7B-Instruct"}),
)
async def create_download(request: Request, services: ServicesOf, team: TeamOf) -> Response:
    """Download a model into the cache of a profile's host, or continue an interrupted download."""
    create = parse(ModelDownloadCreate, await request.body())
    profile = _profile(services.profiles, create.profile)
    download = await services.downloads.create(team, profile.name, create.model, create.revision)
    location = f"/launches/downloads/{download.id}"
    return json_response(
        download_to_wire(download, services.profiles), 202, headers={"Location": location}
    )


@router.get("/launches/downloads", response_model=list[ModelDownloadRead])
async def list_downloads(
    request: Request,
    services: ServicesOf,
    team: TeamOf,
    limit: Limit = 50,
    after: After = None,
) -> Response:
    """List the downloads, the newest first."""
    downloads = await services.downloads.list(team, after=after, limit=limit)
    items = [download_to_wire(one, services.profiles) for one in downloads]
    return await page_response(request, items, last_of_full(items, limit))


@router.get("/launches/downloads/{download_id}", response_model=ModelDownloadRead)
async def read_download(download_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Read one download."""
    download = await services.downloads.get(team, to_id(download_id, "download"))
    return json_response(download_to_wire(download, services.profiles))


@router.post("/launches/downloads/{download_id}/cancel", response_model=ModelDownloadRead)
async def cancel_download(download_id: str, services: ServicesOf, team: TeamOf) -> Response:
    """Cancel a download; what is received stays for another one. An ended one stays unchanged."""
    download = await services.downloads.cancel(team, to_id(download_id, "download"))
    return json_response(download_to_wire(download, services.profiles))


def _profile(profiles: dict[str, Profile], name: str | None) -> Profile:
    """The profile of a download. Raises InvalidRequestError."""
    found = find_profile(profiles, name, None)
    if found is None:
        raise invalid_field("profile", no_such_profile(profiles))
    if found.cache is None:
        raise invalid_field("profile", f"{found.name} has no `cache`: the operator has to add one")
    return found
