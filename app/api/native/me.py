"""/me: the principal of the token."""

from fastapi import APIRouter, Response

from app.api.dependencies import PrincipalOf, ServicesOf
from app.api.json_codec import json_response
from app.api.native.me_schemas import MeRead, me_to_wire

router = APIRouter(tags=["me"])

# A cache must not return it to another token's owner.
_NO_STORE = {"Cache-Control": "no-store"}


@router.get("/me", response_model=MeRead)
async def read_me(services: ServicesOf, principal: PrincipalOf) -> Response:
    """Read the team, scopes and maximum priority of the token."""
    is_authenticated = services.settings.is_authenticated
    return json_response(me_to_wire(principal, is_authenticated), headers=_NO_STORE)
