"""Images of results, read from their stored messages when an attempt begins."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from weakref import WeakValueDictionary

from app.core.database import Database, is_transient
from app.core.weighted_places import WeightedPlaces
from app.inference.image_size import UNKNOWN_PIXELS
from app.inference.images import IMAGES, to_base64
from app.inference.triton_errors import NotTakenError, RefusedError
from app.queue.claim import Claim

_REQUESTS = 2  # of the largest size, whose images one team has between a worker and its engines

_LOAD = """
SELECT image ->> 'url' AS url
FROM results r JOIN contexts c ON c.id = r.context_id
CROSS JOIN jsonb_array_elements(c.messages) WITH ORDINALITY AS m(message, place)
CROSS JOIN jsonb_array_elements(m.message -> 'images') WITH ORDINALITY AS i(image, number)
WHERE r.id = $1
ORDER BY m.place, (image ->> 'after')::int, i.number
"""


# The images of a claimed result as base64. Their room is given back when the stack is closed.
# Raises GenerationError.
LoadImages = Callable[[Claim, ExitStack], Awaitable[list[bytes]]]


async def refuse_images(_claim: Claim, _until: ExitStack) -> list[bytes]:
    raise RefusedError("this worker reads no images")


class StoredImages:
    """Reads images once their team has room for them.

    An engine decodes an image before the first token: a few kilobytes become a hundred megabytes. A team's
    further results wait here, and those of other teams pass them.
    """

    def __init__(self, database: Database, most_pixels: int) -> None:
        """`most_pixels`: of one request (LLM_MAX_IMAGE_PIXELS)."""
        self._database = database
        self._room = _REQUESTS * most_pixels
        self._rooms: WeakValueDictionary[str, WeightedPlaces] = WeakValueDictionary()

    async def load(self, claim: Claim, until: ExitStack) -> list[bytes]:
        """The images in the order of the prompt.

        Raises NotTakenError while the database is unavailable, RefusedError if they are gone.
        """
        images = claim.parameters[IMAGES]
        await self._enter(claim.team_id, images, until)
        try:
            rows = await self._database.fetch(_LOAD, claim.id)
        except Exception as error:
            if is_transient(error):
                raise NotTakenError("the database is unavailable") from error
            raise
        if len(rows) != images["count"]:
            raise RefusedError("the images of this result are no longer stored: send it again")
        return [to_base64(row["url"]) for row in rows]

    async def _enter(self, team_id: str, images: Mapping[str, int], until: ExitStack) -> None:
        room = self._rooms.get(team_id)
        if room is None:
            room = self._rooms[team_id] = WeightedPlaces(self._room)
        # An older version has stored no pixels.
        pixels = images.get("pixels", images["count"] * UNKNOWN_PIXELS)
        until.callback(room.give_back, await room.take(pixels))
