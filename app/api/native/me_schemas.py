"""The wire shape of who is asking."""

from typing import Any

from pydantic import BaseModel, Field

from app.auth.principal import SCOPES, Principal, Scope


class MeRead(BaseModel):
    """The owner of the request: whose rows it sees, and what it may do."""

    team_id: str
    scopes: list[Scope]
    max_priority: int = Field(description="The highest `priority` that it may ask for.")
    token_id: str | None = Field(
        description="By what the token is revoked: of a JWT its `token_id`, of an API key its prefix; "
        "null where no token is needed."
    )
    is_authenticated: bool = Field(
        description="False while authentication is off: then everyone is of this one team."
    )


def me_to_wire(principal: Principal, is_authenticated: bool) -> dict[str, Any]:
    """A principal as JSON members."""
    return {
        "team_id": principal.team_id,
        "scopes": [scope for scope in SCOPES if scope in principal.scopes],
        "max_priority": principal.max_priority,
        "token_id": principal.token_id,
        "is_authenticated": is_authenticated,
    }
