"""/me: the principal of the token."""

from typing import Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, Field

from app.api.dependencies import PrincipalOf, ServicesOf
from app.api.json_codec import json_response
from app.auth.principal import SCOPES, Principal, Scope

router = APIRouter(tags=["me"])

# A cache must not return it to another token's owner.
_NO_STORE = {"Cache-Control": "no-store"}


class MeRead(BaseModel):
    """The request's principal: the team whose rows it reads, and its rights."""

    team_id: str
    scopes: list[Scope]
    max_priority: int = Field(description="The highest `priority` that its requests may have.")
    token_id: str | None = Field(
        description="The id to revoke the token by: a JWT's `token_id`, or an API key's prefix; null "
        "while authentication is off."
    )
    is_authenticated: bool = Field(
        description="False while authentication is off: then all clients share this team."
    )


@router.get("/me", response_model=MeRead)
async def read_me(services: ServicesOf, principal: PrincipalOf) -> Response:
    """Read the team, scopes and maximum priority of the token."""
    wire = me_to_wire(principal, services.settings.is_authenticated)
    return json_response(wire, headers=_NO_STORE)


def me_to_wire(principal: Principal, is_authenticated: bool) -> dict[str, Any]:
    return {
        "team_id": principal.team_id,
        "scopes": [scope for scope in SCOPES if scope in principal.scopes],
        "max_priority": principal.max_priority,
        "token_id": principal.token_id,
        "is_authenticated": is_authenticated,
    }
