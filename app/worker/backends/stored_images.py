"""Images of results, read from their stored messages when an attempt begins."""

from collections.abc import Awaitable, Callable
from uuid import UUID

from app.core.database import Database, is_transient
from app.inference.images import to_base64
from app.inference.triton_errors import NotTakenError, RefusedError

_LOAD = """
SELECT image ->> 'url' AS url
FROM results r JOIN contexts c ON c.id = r.context_id
CROSS JOIN jsonb_array_elements(c.messages) WITH ORDINALITY AS m(message, place)
CROSS JOIN jsonb_array_elements(m.message -> 'images') WITH ORDINALITY AS i(image, number)
WHERE r.id = $1
ORDER BY m.place, (image ->> 'after')::int, i.number
"""


# The images of a result as base64, of which it has so many; raises GenerationError.
LoadImages = Callable[[UUID, int], Awaitable[list[bytes]]]


async def refuse_images(_result_id: UUID, _count: int) -> list[bytes]:
    raise RefusedError("this worker reads no images")


class StoredImages:
    def __init__(self, database: Database) -> None:
        self._database = database

    async def load(self, result_id: UUID, count: int) -> list[bytes]:
        """The images of a result as base64, in the order of its prompt.

        Raises NotTakenError while the database is unavailable, RefusedError if they are gone.
        """
        try:
            rows = await self._database.fetch(_LOAD, result_id)
        except Exception as error:
            if is_transient(error):
                raise NotTakenError("the database is unavailable") from error
            raise
        if len(rows) != count:
            raise RefusedError("the images of this result are no longer stored: send it again")
        return [to_base64(row["url"]) for row in rows]
