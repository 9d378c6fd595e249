"""Client of the API for the pages: JSON in, JSON out, errors as `ApiError`."""

import asyncio
import hashlib
from collections.abc import AsyncIterable, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypedDict, Unpack
from urllib.parse import quote
from uuid import UUID

import httpx
from starlette.requests import Request

from app.ui.errors import ApiError, RefusedError, SignInError

_TIMEOUT = httpx.Timeout(30.0, connect=5.0)
# For requests whose bodies are files: the API stores each part before it reads the next.
FILE_TIMEOUT = httpx.Timeout(120.0, connect=5.0)
# A server answers a load once the model is loaded: minutes for one of many gigabytes.
LOAD_TIMEOUT = httpx.Timeout(900.0, connect=5.0)
# The API sends a comment when nothing else comes, and an export searches for a while between pieces.
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=5.0)
# Each stream holds a connection while its reader stays.
# An idle connection is closed before the API closes it (after 5 s at the earliest:
# LLM_IDLE_CONNECTION_SECONDS), so that no request meets its end.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=50, keepalive_expiry=2.0)
_CACHE_TTL_SECONDS = 5.0
_MAX_CACHED = 1000

Params = Mapping[str, str | int | float | bool | None]


class RequestOptions(TypedDict, total=False):
    params: Params | None
    json: Any
    content: AsyncIterable[bytes] | bytes | None
    headers: Mapping[str, str] | None
    timeout: httpx.Timeout | None


@dataclass(frozen=True, slots=True)
class Me:
    """Owner of the token, as `GET /me` returns it."""

    team_id: str
    scopes: frozenset[str]
    max_priority: int
    is_authenticated: bool  # the API requires tokens

    @property
    def is_operator(self) -> bool:
        return "operate" in self.scopes


class Client:
    """The connections to the API, shared by all requests of this process."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        # A transport of our own: a proxy of the environment would receive the tokens.
        transport = httpx.AsyncHTTPTransport(limits=_LIMITS)
        self.http = httpx.AsyncClient(base_url=self.url, timeout=_TIMEOUT, transport=transport)
        # By path and owner: the end of its time, and the value.
        self.cached: dict[tuple[str, bytes], tuple[float, Any]] = {}

    async def close(self) -> None:
        await self.http.aclose()


class Api:
    """The API with the token of one visitor (None: without). All methods raise `ApiError`."""

    def __init__(self, client: Client, token: str | None, visitor: str | None = None) -> None:
        """`visitor` is the visitor's address: failed sign-ins count for it, not for the page's."""
        self._client = client
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        if visitor:
            self._headers["X-Forwarded-For"] = visitor
        self.owner = hashlib.sha256((token or "").encode()).digest()

    async def me(self) -> Me:
        """The visitor, cached for a few seconds."""
        owner = await self.get_cached("/me")
        return Me(
            owner["team_id"],
            frozenset(owner["scopes"]),
            owner["max_priority"],
            owner["is_authenticated"],
        )

    async def get(self, path: str, params: Params | None = None) -> Any:
        return self._json(await self.send("GET", path, params=params))

    async def get_cached(self, path: str) -> Any:
        """`get` for data that seldom changes: cached for some seconds."""
        cached, key = self._client.cached, (path, self.owner)
        now = asyncio.get_running_loop().time()
        if key not in cached or cached[key][0] <= now:
            value = await self.get(path)
            if len(cached) >= _MAX_CACHED:
                cached.clear()
            cached[key] = (asyncio.get_running_loop().time() + _CACHE_TTL_SECONDS, value)
        return cached[key][1]

    async def get_models(self) -> list[dict[str, Any]]:
        """The models and their adapters, ready ones first."""
        models = [
            one | {"name": name}
            for one in await self.get("/models/")
            for name in (one["name"], *(f"{one['name']}:{adapter}" for adapter in one["adapters"]))
        ]
        return sorted(models, key=lambda one: (not one["ready"], one["name"]))

    async def get_context(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """The prompt of a result, in `content` or in `messages`."""
        context: dict[str, Any] = await self.get(f"/contexts/{segment(result['context_id'])}")
        return context

    async def get_public(self, path: str) -> Any:
        """`get_cached` for data that is the same for all visitors and needs no token."""
        return await Api(self._client, None).get_cached(path)

    async def post(self, path: str, json: Any = None, params: Params | None = None) -> Any:
        return self._json(await self.send("POST", path, json=json, params=params))

    async def delete(self, path: str, params: Params | None = None) -> None:
        await self.send("DELETE", path, params=params)

    def _json(self, response: httpx.Response) -> Any:
        try:
            return response.json()
        except ValueError as error:
            message = f"The server at {self._client.url} is not the API (LLM_UI_API_URL)."
            raise RefusedError(502, "unknown", message) from error

    async def send(self, method: str, path: str, **asked: Unpack[RequestOptions]) -> httpx.Response:
        async with self.stream(method, path, **asked) as response:
            await response.aread()
            return response

    @asynccontextmanager
    async def stream(
        self, method: str, path: str, **asked: Unpack[RequestOptions]
    ) -> AsyncIterator[httpx.Response]:
        params = asked.get("params") or {}
        given = {name: value for name, value in params.items() if value not in (None, "")}
        try:
            request = self._client.http.build_request(
                method,
                path,
                params=given or None,
                json=asked.get("json"),
                content=asked.get("content"),
                headers={**self._headers, **(asked.get("headers") or {})},
                timeout=asked.get("timeout") or _TIMEOUT,
            )
        except (httpx.InvalidURL, ValueError, RecursionError) as error:
            raise _unsendable() from error
        try:
            response = await self._client.http.send(request, stream=True)
        except httpx.HTTPError as error:
            raise _unreachable(self._client.url, error) from error
        try:
            if response.status_code >= 300:  # the API redirects nowhere
                raise await _error(response)
            yield response
        except httpx.HTTPError as error:
            raise _unreachable(self._client.url, error) from error
        finally:
            await response.aclose()


def api_of(request: Request) -> Api:
    return Api(request.app.state.client, request.state.token, visitor_of(request))


def visitor_of(request: Request) -> str | None:
    return request.client.host if request.client else None


def segment(text: str) -> str:
    """A name as one segment of a path; `..` is a valid name, too."""
    return quote(text, safe="").replace(".", "%2E")


def identifier(text: str) -> str:
    """The id of a row as a segment of a path.

    Raises ApiError for other texts, which the API never gets: it has words in the place of ids, such as
    `/results/export`, whose response has all results.
    """
    try:
        return str(UUID(text))
    except ValueError:
        raise RefusedError(
            404, "not_found", f"There is nothing with the id {text[:64]!r}."
        ) from None


def _unsendable() -> ApiError:
    """Error of values that no request can have: NaN, half a character, an endless address."""
    message = (
        "This cannot be sent: a name or a filter is too long, or a number or a text is invalid in "
        "JSON."
    )
    return RefusedError(422, "invalid_request", message)


def _unreachable(url: str, error: httpx.HTTPError) -> ApiError:
    message = f"The API at {url} does not answer. Is it running? (LLM_UI_API_URL)"
    if isinstance(error, httpx.ReadTimeout):
        message = (
            f"The API at {url} has not answered in time. It may still complete the request: "
            "check before you repeat it."
        )
    return RefusedError(502, "unreachable", message)


async def _error(response: httpx.Response) -> ApiError:
    """Read a problem (RFC 9457), OpenAI's error, or any other response."""
    fields: list[tuple[str, str]] = []
    try:
        await response.aread()
        problem = response.json()
        if isinstance(problem.get("error"), dict):  # OpenAI's shape
            code, message = str(problem["error"].get("code")), problem["error"]["message"]
        else:
            code, message = problem["code"], problem["detail"]
            errors = problem.get("errors", ())
            fields = [
                (one["field"], one["message"].replace("Input should be", "must be", 1))
                for one in errors
            ]
            if "`errors` names" in message:
                # The API's sentence names the body's members: here people filled in a form.
                message = "Some of what you entered cannot be sent."
    except (ValueError, KeyError, TypeError, AttributeError, httpx.HTTPError):
        code, message = "unknown", f"The API answered with status {response.status_code}."
    kind = SignInError if response.status_code == 401 else RefusedError
    return kind(response.status_code, code, message, fields, response.headers.get("retry-after"))
