"""What a JWT must say to be one of ours: whose it is, and what it may do."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.errors import InvalidTokenError
from app.principal import SCOPES, Principal, Scope

MAX_TEAM = 64
MAX_TOKEN_ID = 128


def _printable(value: str) -> str:
    if not value.isprintable():  # control characters, and what PostgreSQL cannot hold
        raise ValueError("must be printable text")
    return value


Team = Annotated[str, Field(min_length=1, max_length=MAX_TEAM), AfterValidator(_printable)]
TokenId = Annotated[str, Field(min_length=1, max_length=MAX_TOKEN_ID), AfterValidator(_printable)]
MaxPriority = Annotated[int, Field(ge=0, le=100)]


class _Claims(BaseModel):
    """Ours among the claims. Scopes that we do not know grant nothing: they are another's."""

    model_config = ConfigDict(strict=True, extra="ignore")

    team_id: Team
    token_id: TokenId
    scopes: list[str] = ["use"]
    max_priority: MaxPriority = 0


def to_principal(claims: Mapping[str, Any]) -> Principal:
    """Who the claims speak for. Raises InvalidTokenError that names the claim at fault."""
    try:
        ours = _Claims.model_validate(dict(claims))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise InvalidTokenError(f"claim {name}: {problem['msg']}") from None
    scopes: frozenset[Scope] = frozenset(scope for scope in SCOPES if scope in ours.scopes)
    return Principal(ours.team_id, scopes, ours.max_priority, ours.token_id)
