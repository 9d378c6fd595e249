"""Calls to clients' URLs: at checked addresses only (app/core/url_guard.py)."""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from http.cookiejar import CookieJar, DefaultCookiePolicy

import httpx

from app import __version__
from app.core.team_lookups import TeamLookups
from app.core.url_guard import Lookup, UrlRules

_CONNECT_SECONDS = 5.0


class GuardedClient:
    """One client a process for each kind of URL; used inside `async with`.

    No cookies, no proxies, no redirects. No connection is used twice: two names may share an
    address, and a connection was verified for one of them.
    """

    def __init__(
        self, name: str, rules: UrlRules, seconds: float, lookup: Lookup = socket.getaddrinfo
    ) -> None:
        """`name` names its threads; `seconds` bound each wait for the other side."""
        self._rules = rules
        self._lookups = TeamLookups(name, lookup)
        self._client = httpx.AsyncClient(
            verify=httpx.create_ssl_context(),  # or the authorities in SSL_CERT_FILE
            trust_env=False,
            follow_redirects=False,
            cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS),
            headers={"user-agent": f"llm-api-service/{__version__}", "accept-encoding": "identity"},
        )

    async def __aenter__(self) -> "GuardedClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()
        self._lookups.close()

    @asynccontextmanager
    async def call(
        self,
        team_id: str,
        method: str,
        address: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
    ) -> AsyncIterator[httpx.Response]:
        """Call a URL at the first of its addresses that accepts a connection.

        Raises RefusedTargetError, httpx's errors, OSError and UnicodeError.
        """
        url = httpx.URL(address)
        places = await self._lookups.resolve(team_id, url, self._rules)
        async with AsyncExitStack() as stack:
            for place in places:
                stream = self._client.stream(
                    method,
                    url.copy_with(host=place),
                    headers={**headers, "host": url.netloc.decode()},
                    content=body,
                    # The certificate must be that of the name, for every address.
                    extensions={"sni_hostname": url.raw_host.decode().removesuffix(".")},
                )
                try:
                    response = await stack.enter_async_context(stream)
                except (httpx.ConnectError, httpx.ConnectTimeout):
                    if place == places[-1]:
                        raise
                else:
                    yield response
                    return
