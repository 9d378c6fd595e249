"""An HTTP proxy before the service that replaces a share of its answers, as a bad network does."""

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import httpx

from tests.listening import listening

_PASSED = ("content-type", "link", "location", "retry-after")


class Fault(Enum):
    """Replacement of an answer."""

    BUSY = "429 of a proxy, without Retry-After; the request does not arrive"
    UNAVAILABLE = "503 of a proxy; the request does not arrive"
    RESET = "a connection reset; the request does not arrive"
    ANSWER_LOST = "a connection reset behind the request"
    ROW_REFUSED = "503 in place of one row's outcome in the answer to a list"


class FaultyProxy:
    """Passes requests on to `url`, but for a share of them; `faults` counts those."""

    def __init__(self, url: str, *, share: float, seed: int) -> None:
        self._share = share
        self._chance = random.Random(seed)  # noqa: S311 - of faults
        self._http = httpx.AsyncClient(base_url=url, timeout=60, trust_env=False)
        self.faults: Counter[Fault] = Counter()
        self.requests = 0
        self.url = ""

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Listen on a port of 127.0.0.1."""
        async with self._http, listening(self._serve) as port:
            self.url = f"http://127.0.0.1:{port}"
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has gone, perhaps killed
        finally:
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request of a connection; False: it is to be reset."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        first, *lines = head.strip().split("\r\n")
        method, path, _ = first.split(" ")
        headers = httpx.Headers(
            {name: value for name, _, value in (line.partition(": ") for line in lines)}
        )
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.requests += 1
        fault = self._next_fault()
        if fault is Fault.RESET:
            return False
        if fault in (Fault.BUSY, Fault.UNAVAILABLE):
            answer = httpx.Response(429 if fault is Fault.BUSY else 503, text="<html>busy</html>")
        else:
            sent = {"content-type": headers.get("content-type", "")}
            try:
                answer = await self._http.request(method, path, content=body, headers=sent)
            except httpx.TransportError:  # the service was killed
                return False
        if fault is Fault.ANSWER_LOST:
            return False
        content = answer.content
        if fault is Fault.ROW_REFUSED and body[:1] == b"[" and answer.status_code == 202:
            content = self._with_a_refused_row(answer.json())
        _write(writer, answer, content)
        await writer.drain()
        return True

    def _next_fault(self) -> Fault | None:
        if self._chance.random() >= self._share:
            return None
        fault = self._chance.choice(list(Fault))
        self.faults[fault] += 1
        return fault

    def _with_a_refused_row(self, outcomes: list[dict[str, Any]]) -> bytes:
        problem = {"status": 503, "code": "templates_busy", "title": "Busy", "detail": "Try again."}
        outcomes[self._chance.randrange(len(outcomes))] = problem
        return json.dumps(outcomes).encode()


def _write(writer: asyncio.StreamWriter, answer: httpx.Response, content: bytes) -> None:
    kept = {name: value for name, value in answer.headers.items() if name in _PASSED}
    kept["content-length"] = str(len(content))
    lines = "".join(f"{name}: {value}\r\n" for name, value in kept.items())
    writer.write(f"HTTP/1.1 {answer.status_code} X\r\n{lines}\r\n".encode() + content)
