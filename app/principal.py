"""Who is asking: the team whose rows a request may see, and what it may do."""

from dataclasses import dataclass
from typing import Literal

from app.settings import DEFAULT_TEAM

Scope = Literal["use", "operate"]


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
ANYONE = Principal(DEFAULT_TEAM, frozenset({"use", "operate"}))
