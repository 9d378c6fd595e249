"""A process that indexes results in small batches until it is killed."""

import asyncio

from app.core.database import Database
from app.core.settings import Settings
from app.queue.depth import QueueDepth
from app.results.indexer import ResultIndexer


async def main() -> None:
    settings = Settings.model_validate({})
    async with Database(settings, "test") as database:
        indexer = ResultIndexer(database, QueueDepth(database, settings), settings)
        indexer._max_rows = 10
        while True:
            await indexer.index()
            await asyncio.sleep(0.01)


if __name__ == "__main__":
    asyncio.run(main())
