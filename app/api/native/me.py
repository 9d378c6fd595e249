"""/me: who is asking, as the service understood the token."""

from fastapi import APIRouter
from starlette.responses import Response

from app.api.common import PrincipalOf, ServicesOf
from app.api.json_codec import json_response
from app.api.native.me_schemas import MeRead, me_to_wire

router = APIRouter(tags=["me"])

# Another token's owner must not be told from a cache on the way.
_NO_STORE = {"Cache-Control": "no-store"}


@router.get("/me", response_model=MeRead)
async def read_me(services: ServicesOf, principal: PrincipalOf) -> Response:
    """Read the team, scopes and highest priority of the token that is sent."""
    is_authenticated = services.settings.is_authenticated
    return json_response(me_to_wire(principal, is_authenticated), headers=_NO_STORE)
