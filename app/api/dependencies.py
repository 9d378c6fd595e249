"""Dependencies of the handlers: services, principal, team and ids of a request."""

from typing import Annotated
from uuid import UUID

from fastapi import Depends, Query, Request

from app.api.container import Services
from app.auth.principal import Principal
from app.core.errors import NotFoundError


def services_of(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


def principal_of(request: Request) -> Principal:
    principal: Principal = request.scope["principal"]
    return principal


def team_of(request: Request) -> str:
    return principal_of(request).team_id


# FastAPI calls a dependency that is not a coroutine in a thread.


async def _services(request: Request) -> Services:
    return services_of(request)


async def _principal(request: Request) -> Principal:
    return principal_of(request)


async def _team(request: Request) -> str:
    return team_of(request)


ServicesOf = Annotated[Services, Depends(_services)]

PrincipalOf = Annotated[Principal, Depends(_principal)]

TeamOf = Annotated[str, Depends(_team)]

Name = Annotated[str | None, Query(max_length=256, pattern=r"^[^\x00]*$")]

Force = Annotated[bool, Query(description="Delete pending results too, after stopping them.")]


def to_id(text: str, noun: str) -> UUID:
    """An id from a path. Raises NotFoundError for an invalid one."""
    try:
        return UUID(text)
    except ValueError:
        raise NotFoundError(f"There is no {noun} {text[:64]!r}.") from None


def from_wire_id(prefix: str, text: str, noun: str) -> UUID:
    """The id in `file-...`, `batch_...`. Raises NotFoundError for an invalid one."""
    try:
        if text.startswith(prefix):
            return UUID(text.removeprefix(prefix))
    except ValueError:
        pass
    raise NotFoundError(f"There is no {noun} {text[:100]!r}.")
