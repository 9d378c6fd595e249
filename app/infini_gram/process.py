"""The worker's end of an engine in its own process (`engine_main`)."""

import asyncio
import contextlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from app.core.program import ROOT

_OURS = re.compile(r"LLM_|JWT_|PG|DATABASE")
_OPEN_SECONDS = 600.0  # for an index whose files are not cached


@dataclass(frozen=True, slots=True)
class Attributed:
    """A text's attribution: the response as JSON, its number of tokens, and the index's version."""

    answer: str
    tokens: int
    version: int


class EngineDiedError(Exception):
    """The process ended; the message describes its exit."""


class AttributionRefusedError(Exception):
    """The request goes beyond a bound, or is invalid for this index."""


class AttributionFailedError(Exception):
    """The engine reported an error, which is the message; or the service has a bug."""

    def __init__(self, message: str, *, is_bug: bool = False) -> None:
        super().__init__(message)
        self.is_bug = is_bug


class EngineProcess:
    """One engine, which attributes one text at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._is_killed = False

    @classmethod
    async def start(cls, declarations: Path, name: str) -> "EngineProcess":
        """Open an index. Raises AttributionFailedError, EngineDiedError, TimeoutError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "app.infini_gram.engine_main",
            str(declarations), name, str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            # No variables of the service: a process that hostile input crashes must have no password.
            env={key: value for key, value in os.environ.items() if not _OURS.match(key)},
            cwd=ROOT,
            start_new_session=True,  # as `engine_main._lower_priority` needs
        )  # fmt: skip
        engine = cls(process)
        try:
            async with asyncio.timeout(_OPEN_SECONDS):
                await engine._read_response()
        except BaseException:
            await engine.end()
            raise
        return engine

    @property
    def is_alive(self) -> bool:
        """False also for a killed process that has not ended yet."""
        return self._process.returncode is None and not self._is_killed

    async def attribute(self, text: str, parameters: Mapping[str, Any]) -> Attributed:
        """Raises AttributionRefusedError, AttributionFailedError, EngineDiedError.

        A caller that is cancelled must end the process, which continues otherwise.
        """
        assert self._process.stdin is not None
        request = orjson.dumps({"text": text, "parameters": parameters})
        try:
            self._process.stdin.write(request + b"\n")
            await self._process.stdin.drain()
        except ConnectionError:
            raise await self._death() from None
        return await self._read_response()

    async def _read_response(self) -> Attributed:
        assert self._process.stdout is not None
        try:
            head = orjson.loads(await self._process.stdout.readline() or b"null")
            if head is None:
                raise await self._death()
            body = (await self._process.stdout.readexactly(head["size"])).decode()
        except asyncio.IncompleteReadError:
            raise await self._death() from None
        if head["kind"] == "ok":
            return Attributed(body, head["tokens"], head["version"])
        if head["kind"] == "invalid":
            raise AttributionRefusedError(body)
        raise AttributionFailedError(body, is_bug=head["kind"] == "bug")

    async def _death(self) -> EngineDiedError:
        status = await self._process.wait()
        how = f"was killed by signal {-status}" if status < 0 else f"exited with status {status}"
        return EngineDiedError(f"the engine's process {how}")

    def kill(self) -> None:
        self._is_killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def wait(self) -> None:
        """Return when the process has ended.

        Workers run on uvloop. asyncio's own loop would also wait for the end of the output, which has no
        reader after a cancellation.
        """
        await self._process.wait()

    async def end(self) -> None:
        self.kill()
        await self._process.wait()
