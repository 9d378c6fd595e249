"""The claims of the service's JWTs: team, token id, scopes, priority and times."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from app.auth.principal import SCOPES, Principal, Scope
from app.core.errors import InvalidTokenError

MAX_TEAM = 64
MAX_TOKEN_ID = 128
MAX_TIME = 2**53  # seconds: larger integers are no floats


def _printable(value: str) -> str:
    if not value.isprintable():  # control characters, and what PostgreSQL cannot hold
        raise ValueError("must be printable text")
    return value


def _seconds(value: object) -> object:
    # Python's bool is an int; NaN is in no range.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME:
        raise ValueError("must be a number of seconds since 1970")
    return value


Team = Annotated[str, Field(min_length=1, max_length=MAX_TEAM), AfterValidator(_printable)]
TokenId = Annotated[str, Field(min_length=1, max_length=MAX_TOKEN_ID), AfterValidator(_printable)]
# A NumericDate of RFC 7519. PyJWT also accepts strings and booleans.
Seconds = Annotated[Any, AfterValidator(_seconds)]
MaxPriority = Annotated[int, Field(ge=0, le=100)]


class _Claims(BaseModel):
    """The claims that the service reads. Unknown scopes belong to other services and grant nothing."""

    model_config = ConfigDict(strict=True, extra="ignore")

    team_id: Team
    token_id: TokenId
    scopes: list[str] = ["use"]
    max_priority: MaxPriority = 0
    exp: Seconds = 0
    nbf: Seconds = 0
    iat: Seconds = 0


def to_principal(claims: Mapping[str, Any]) -> Principal:
    """The principal of the claims. Raises InvalidTokenError that names the wrong claim."""
    try:
        ours = _Claims.model_validate(dict(claims))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(str(part) for part in problem["loc"])
        raise InvalidTokenError(f"claim {name}: {problem['msg']}") from None
    scopes: frozenset[Scope] = frozenset(scope for scope in SCOPES if scope in ours.scopes)
    return Principal(ours.team_id, scopes, ours.max_priority, ours.token_id)
