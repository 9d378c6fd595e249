"""Names of the models' inputs: an optional one means that a backend supports a feature."""

import asyncio
from collections.abc import Awaitable, Callable

import grpc

from app.inference.triton_errors import NotTakenError

# The absence of an input is cached for this time, since the model may be reloaded with it. A model that
# loses an input refuses requests with it.
_CACHE_TTL_SECONDS = 60.0


class ModelInputs:
    """Cache of the names of each model's inputs; `query` asks the server for them."""

    def __init__(self, query: Callable[[str], Awaitable[set[str]]]) -> None:
        self._query = query
        self._known: dict[str, tuple[set[str], float]] = {}  # names, and loop time of the query

    async def has(self, model: str, name: str, *, is_needed: bool = False) -> bool:
        """Return if a model has the input.

        If the server does not answer: raises NotTakenError if the result `is_needed`, else False.
        """
        now = asyncio.get_running_loop().time()
        names, queried_at = self._known.get(model, (set[str](), -_CACHE_TTL_SECONDS))
        if name in names or now - queried_at < _CACHE_TTL_SECONDS:
            return name in names
        try:
            names = await self._query(model)
        except grpc.aio.AioRpcError as error:
            if is_needed:
                raise NotTakenError(error.details() or error.code().name) from error
            return False
        self._known[model] = (names, now)
        return name in names

    def forget(self, model: str) -> None:
        self._known.pop(model, None)
