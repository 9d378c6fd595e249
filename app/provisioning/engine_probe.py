"""Health of a launched server whose job has no supervisor: one generated token after each use.

Triton reports a model as ready after its engine died. A probe counts as a request, so a model without
use since its last check is not probed: an idle server is to be stopped.
"""

import asyncio
import contextlib
import re
from dataclasses import dataclass
from datetime import datetime

from app.core.errors import NotFoundError, TritonError, TritonUnavailableError
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import GenerationError, RefusedError

_MAX_REASON_CHARACTERS = 200  # characters
_DEAD_SINCE = re.compile(r"engine dead since (\S+): ")


@dataclass(frozen=True, slots=True)
class Finding:
    """State of a model: its count of requests, None if it is not ready, and its error, if any."""

    requests: int | None = None
    is_used: bool = False
    error: str = ""


async def check(
    server: TritonClient, model: str, known: int, probe_seconds: float | None
) -> Finding:
    """Find out whether a model is ready and, after use, whether it generates a token.

    `known`: the count of requests that the last check returned. None for `probe_seconds` disables the
    probe.
    """
    async with server as client:
        try:
            if not any(entry.name == model and entry.ready for entry in await client.index()):
                return Finding()
            requests = await client.request_count(model)
            is_used = requests != known
            if probe_seconds is None or not is_used:
                return Finding(requests, is_used)
            error = await _probe(client, model, probe_seconds)
            # The probe is not a use.
            return Finding(await client.request_count(model), is_used, error)
        except (TritonError, TritonUnavailableError, NotFoundError):
            return Finding()


async def reload(server: TritonClient, model: str, seconds: float) -> None:
    """Ask the server to unload and load a model, with this time-out for each.

    Triton continues after a time-out; later checks find the model ready again, or not.
    """
    async with server as client:
        for call in (client.unload, client.load):
            with contextlib.suppress(
                TritonError, TritonUnavailableError, NotFoundError, TimeoutError
            ):
                async with asyncio.timeout(seconds):
                    await call(model)


def dead_reason(error: str, now: datetime, previous: str) -> str:
    """Reason of a launch whose engine is dead; keeps the time that a previous reason named."""
    since = dead_since(previous) or now
    return (
        f"engine dead since {since.isoformat(timespec='seconds')}: {error[:_MAX_REASON_CHARACTERS]}"
    )


def dead_since(reason: str) -> datetime | None:
    found = _DEAD_SINCE.match(reason)
    return datetime.fromisoformat(found[1]) if found else None


async def _probe(client: TritonClient, model: str, seconds: float) -> str:
    """Generate one token; return the model's error. A late response is none: a full engine is late."""
    try:
        async with asyncio.timeout(seconds):
            async for _ in client.generate(model, "a", {"max_tokens": 1, "temperature": 0}):
                pass
    except (RefusedError, TimeoutError):
        return ""
    except GenerationError as error:
        return " ".join(str(error).split()) or type(error).__name__
    return ""
