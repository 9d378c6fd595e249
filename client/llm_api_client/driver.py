"""Drivers: perform the steps of operations over HTTP, in the calling thread or in an event loop."""

import asyncio
import platform
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, TypeVar

import httpx

from llm_api_client import config
from llm_api_client.config import Endpoint
from llm_api_client.retries import with_retries
from llm_api_client.steps import (
    Call,
    Emit,
    Exchange,
    Feed,
    Lost,
    Open,
    Outcome,
    Pause,
    Read,
    Reply,
    Request,
    Step,
)

T = TypeVar("T")

try:
    __version__ = version("llm-api-client")
except PackageNotFoundError:  # run from a checkout
    __version__ = "0"
_AGENT = f"llm-api-client/{__version__} python/{platform.python_version()}"
# The request cannot have reached the service.
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_CONNECT_SECONDS = 10.0


def _options(endpoint: Endpoint, timeout: float) -> dict[str, Any]:
    """Options of both of httpx's clients: connections are kept, and as many as needed are opened."""
    authorization = {"Authorization": f"Bearer {endpoint.key}"} if endpoint.key else {}
    return {
        "base_url": endpoint.url,
        "headers": {"User-Agent": _AGENT, "Accept": "application/json", **authorization},
        "timeout": httpx.Timeout(timeout, connect=_CONNECT_SECONDS, pool=None),
        # A proxy of the environment would receive what stays on this host.
        "trust_env": not config.is_local(endpoint.url),
        "limits": httpx.Limits(max_connections=None, max_keepalive_connections=100),
    }


def _arguments(http: httpx.Client | httpx.AsyncClient, request: Request) -> dict[str, Any]:
    headers: Mapping[str, str] = request.headers
    body = request.body
    if body is not None:
        headers = {"Content-Type": "application/json", **headers}
    timeout = http.timeout
    if request.timeout is not None:
        timeout = httpx.Timeout(request.timeout, connect=_CONNECT_SECONDS, pool=None)
    return {
        "method": request.method,
        "url": request.path,
        "params": request.parameters or None,
        "headers": headers,
        "content": body,
        "timeout": timeout,
    }


def _lost(error: Exception) -> Lost:
    return Lost(error, may_have_arrived=not isinstance(error, _NOT_SENT))


class Driver:
    """Performs steps in the calling thread; threads may share it."""

    def __init__(
        self, endpoint: Endpoint, timeout: float, patience: float,
        transport: httpx.BaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._http = httpx.Client(transport=transport, **_options(endpoint, timeout))
        self.patience = patience

    def run(self, operation: Call[T]) -> T:
        """The operation's result."""
        steps = with_retries(operation, self.patience)
        channel = _Channel(self._http)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = channel.take(step)

    def iterate(self, feed: Feed[T], patience: float | None = None) -> Iterator[T]:
        """The items that the operation emits; `patience` in seconds, default: the client's."""
        steps = with_retries(feed, self.patience if patience is None else patience)
        outcome: Outcome = None
        with _Channel(self._http) as channel:
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration:
                    return
                outcome = None
                if isinstance(step, Emit):
                    yield step.item
                else:
                    outcome = channel.take(step)

    def close(self) -> None:
        self._http.close()


class _Channel:
    """Performs the steps of one operation, and has its open response."""

    def __init__(self, http: httpx.Client) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: Iterator[bytes] = iter(())

    def take(self, step: Step) -> Outcome:
        try:
            if isinstance(step, Exchange):
                response = self._http.request(**_arguments(self._http, step.request))
                return Reply(response.status_code, response.headers, response.content)
            if isinstance(step, Open):
                return self._open(step.request)
            if isinstance(step, Read):
                return next(self._blocks, b"")
        except (httpx.TransportError, httpx.DecodingError) as error:
            return _lost(error)
        assert isinstance(step, Pause)
        time.sleep(step.seconds)
        return None

    def _open(self, request: Request) -> Reply:
        self.close()
        built = self._http.build_request(**_arguments(self._http, request))
        self._response = response = self._http.send(built, stream=True)
        self._blocks = response.iter_bytes()
        body = b"" if response.status_code == 200 else response.read()
        return Reply(response.status_code, response.headers, body)

    def close(self) -> None:
        if self._response is not None:
            self._response.close()

    def __enter__(self) -> "_Channel":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class AsyncDriver:
    """Performs steps in the event loop of the caller."""

    def __init__(
        self, endpoint: Endpoint, timeout: float, patience: float,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:  # fmt: skip
        self._http = httpx.AsyncClient(transport=transport, **_options(endpoint, timeout))
        self.patience = patience

    async def run(self, operation: Call[T]) -> T:
        """The operation's result."""
        steps = with_retries(operation, self.patience)
        channel = _AsyncChannel(self._http)
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as end:
                result: T = end.value
                return result
            outcome = await channel.take(step)

    async def iterate(self, feed: Feed[T], patience: float | None = None) -> AsyncIterator[T]:
        """The items that the operation emits; `patience` in seconds, default: the client's."""
        steps = with_retries(feed, self.patience if patience is None else patience)
        outcome: Outcome = None
        async with _AsyncChannel(self._http) as channel:
            while True:
                try:
                    step = steps.send(outcome)
                except StopIteration:
                    return
                outcome = None
                if isinstance(step, Emit):
                    yield step.item
                else:
                    outcome = await channel.take(step)

    async def close(self) -> None:
        await self._http.aclose()


class _AsyncChannel:
    """Performs the steps of one operation, and has its open response."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http
        self._response: httpx.Response | None = None
        self._blocks: AsyncIterator[bytes] | None = None

    async def take(self, step: Step) -> Outcome:
        try:
            if isinstance(step, Exchange):
                response = await self._http.request(**_arguments(self._http, step.request))
                return Reply(response.status_code, response.headers, response.content)
            if isinstance(step, Open):
                return await self._open(step.request)
            if isinstance(step, Read):
                return await self._read()
        except (httpx.TransportError, httpx.DecodingError) as error:
            return _lost(error)
        assert isinstance(step, Pause)
        await asyncio.sleep(step.seconds)
        return None

    async def _open(self, request: Request) -> Reply:
        await self.close()
        built = self._http.build_request(**_arguments(self._http, request))
        self._response = response = await self._http.send(built, stream=True)
        self._blocks = response.aiter_bytes()
        body = b"" if response.status_code == 200 else await response.aread()
        return Reply(response.status_code, response.headers, body)

    async def _read(self) -> bytes:
        return b"" if self._blocks is None else await anext(self._blocks, b"")

    async def close(self) -> None:
        if self._response is not None:
            await self._response.aclose()

    async def __aenter__(self) -> "_AsyncChannel":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()
