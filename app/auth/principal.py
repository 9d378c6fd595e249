"""Who is asking: the team whose rows a request may see, and what it may do."""

from dataclasses import dataclass
from typing import Literal, get_args

from app.core.settings.fields import DEFAULT_TEAM

Scope = Literal["use", "operate"]
SCOPES: tuple[Scope, ...] = get_args(Scope)


@dataclass(slots=True, frozen=True)
class Principal:
    """The owner of a request, as its token says.

    `use` sends and reads results, `operate` also governs the service. `max_priority` is the highest
    priority it may ask for.
    """

    team_id: str
    scopes: frozenset[Scope]
    max_priority: int = 0
    token_id: str | None = None


# Without authentication everyone is of one team, and may do everything.
ANYONE = Principal(DEFAULT_TEAM, frozenset(SCOPES))
# With it, who needs no token (`access`) is of no team: no row has an empty one.
NOBODY = Principal("", frozenset())
