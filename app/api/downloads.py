"""Downloads of stored files: piece by piece, in a place of their team."""

import contextlib
from collections.abc import AsyncGenerator

from app.api.container import Services

DOWNLOAD_BYTES = 125_000  # that are read at once


async def download(
    services: Services, team: str, first: bytes, pieces: AsyncGenerator[bytes, None]
) -> AsyncGenerator[bytes, None]:
    with services.hub.downloading(team):
        async with contextlib.aclosing(pieces):
            yield first
            async for piece in pieces:
                yield piece
