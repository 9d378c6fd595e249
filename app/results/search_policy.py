"""Search by words: on or off by the setting, and by a team's own value, which replaces the setting's.

Ended results are counted either way. Results that ended while it was off never have words.
"""

from typing import Literal

from app.core.database import Database
from app.core.errors import FieldError, SearchOffError
from app.core.program import PROGRAM
from app.core.settings import Settings

Search = Literal["words", "off"]

_ALL = "SELECT team_id, search FROM team_search ORDER BY team_id"
_OF = "SELECT search FROM team_search WHERE team_id = $1"
_SET = """
INSERT INTO team_search (team_id, search) VALUES ($1, $2)
ON CONFLICT (team_id) DO UPDATE SET search = excluded.search
"""
_REMOVE = "DELETE FROM team_search WHERE team_id = $1 RETURNING team_id"


def is_searchable_sql(team: str, default: str) -> str:
    """A condition: the team's results can be searched; `default` is the setting's value.

    The teams that differ from it are read once a statement.
    """
    others = f"ARRAY(SELECT team_id FROM team_search WHERE search <> {default}::text)"
    return f"({team} = ANY ({others})) = ({default}::text = 'off')"


class SearchPolicy:
    """Reads and sets the search of teams, without a cache: beside a search it costs nothing."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self.default: Search = settings.search

    async def check(self, team_id: str) -> None:
        """Raise SearchOffError if the team's results cannot be searched."""
        row = await self._database.fetchrow(_OF, team_id)
        if (self.default if row is None else row["search"]) == "words":
            return
        remedy = (
            "the setting LLM_SEARCH is `off`"
            if row is None
            else f"`{PROGRAM} team search` turned it off for this team"
        )
        message = f"the search by words is off: {remedy}"
        raise SearchOffError(
            f"q: {message}. List results by the other filters, or ask the operator to turn it on.",
            [FieldError("query.q", message)],
        )

    async def stored(self) -> list[tuple[str, Search]]:
        """Each team's own value."""
        rows = await self._database.fetch(_ALL)
        return [(row["team_id"], row["search"]) for row in rows]

    async def set(self, team_id: str, search: Search) -> None:
        await self._database.fetch(_SET, team_id, search)

    async def remove(self, team_id: str) -> None:
        """Go back to the setting's value."""
        await self._database.fetch(_REMOVE, team_id)
