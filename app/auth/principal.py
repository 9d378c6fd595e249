"""The authenticated caller: its team, whose rows it may see, and its scopes."""

from dataclasses import dataclass
from typing import Literal, get_args

from app.core.settings.fields import DEFAULT_TEAM

Scope = Literal["use", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(slots=True, frozen=True)
class Principal:
    """The owner of a request, as defined by its token.

    Scope `use` permits to send and read results; `operate` permits to administer the service.
    `max_priority` is the highest priority that the owner may request.
    """

    team_id: str
    scopes: frozenset[Scope]
    max_priority: int = 0
    token_id: str | None = None


# Every caller, if authentication is off.
ANYONE = Principal(DEFAULT_TEAM, frozenset(SCOPES))
# The caller of a public path, if authentication is on: no row belongs to the empty team.
NOBODY = Principal("", frozenset())
