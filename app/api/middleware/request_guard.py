"""Validates Host, Origin, Content-Type and body size.

While authentication is off, the attacker is a page in the user's browser, or a client of a reverse proxy
that makes the API public: requests that a proxy forwards from other machines are refused. The Host allow-list stops DNS
rebinding; Origin, and the rule that bodies are JSON (which another site's page cannot send without a
preflight), stop cross-site requests. There is no CORS. Any page may send a form, so uploads must come
from a page of this very host, or from a client without an Origin.

With authentication another site's page has no token to send, so any Host is accepted; an Origin, if
sent, must be that host.
"""

import asyncio
import contextlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NoReturn

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.errors.error_responses import refusal_of
from app.api.json_codec import JSON
from app.core.byte_budget import FREE_BYTES, read_within
from app.core.errors import (
    BodyTooLargeError,
    ForbiddenOriginError,
    HttpError,
    MediaTypeError,
    ServiceError,
)

_DISCARD_SECONDS = 5.0
# A body holds memory of others while it arrives.
_BODY_SECONDS = 60.0
_SLOWEST_BYTES_PER_SECOND = 20_000
# Headers of reverse proxies: the client's address, or only that there is a proxy.
_CLIENT_HEADERS = frozenset({b"x-forwarded-for", b"x-real-ip"})
_FORWARDED_BY = frozenset({b"forwarded", b"via"})
_Network = IPv4Network | IPv6Network
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "TRACE"})


class RequestGuard:
    """ASGI middleware that rejects early, and replays the body in one piece.

    If `allowed_hosts` is None, every host is allowed, and the only origin is the host itself. Forms sent
    to a path of `uploads` are streamed, up to its bound in bytes. If `local_clients` (addresses, networks)
    are given, proxied requests of other clients are refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        allowed_hosts: Iterable[str] | None,
        max_body_bytes: int,
        uploads: Mapping[str, int] | None = None,
        local_clients: Iterable[str] | None = None,
    ) -> None:
        self._app = app
        self._uploads = uploads or {}
        self._allowed = (
            None if allowed_hosts is None else frozenset(host.lower() for host in allowed_hosts)
        )
        self._max_body_bytes = max_body_bytes
        self._local_clients = (
            None if local_clients is None else [ip_network(one) for one in local_clients]
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = dict(scope["headers"])
            self._check_origin(headers)
            if self._local_clients is not None:
                _check_not_proxied(scope["headers"], self._local_clients)
            if scope["method"] == "POST" and scope["path"] in self._uploads and _is_form(headers):
                _check_same_origin(headers)
                bound = self._uploads[scope["path"]]
                receive = await _bounded(headers, receive, bound, "LLM_MAX_FILE_BYTES")
            elif scope["method"] not in _SAFE_METHODS:
                receive = _replay(await self._read_body(headers, receive), receive)
        except ServiceError as error:
            await refusal_of(scope, error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check_origin(self, headers: dict[bytes, bytes]) -> None:
        allowed = self._allowed
        if allowed is None:
            allowed = frozenset({_host_name(headers.get(b"host", b"").decode("latin-1"))})
        elif "*" in allowed:
            return
        for name in (b"host", b"origin"):
            value = headers.get(name)
            if value is None:
                continue
            host = _host_name(value.decode("latin-1"))
            if host not in allowed:
                raise ForbiddenOriginError(
                    f"{name.decode().title()} {host!r} is not allowed; add it to "
                    "LLM_ALLOWED_HOSTS if it is yours."
                )

    async def _read_body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        receive = await _bounded(headers, receive, self._max_body_bytes, "LLM_MAX_BODY_BYTES")
        most = self._max_body_bytes if b"transfer-encoding" in headers else 0
        if (declared := headers.get(b"content-length", b"")).isdigit():
            most = int(declared)
        if most <= FREE_BYTES:
            body = await _read_all(receive)
        else:
            body, _ = await read_within(most, partial(_read_in_time, receive, most), len)
        if body:
            media_type = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            if media_type != JSON.encode() and not media_type.endswith(b"+json"):
                raise MediaTypeError("Send the body with `Content-Type: application/json`.")
        return body.removeprefix(
            BOM_UTF8
        )  # some clients' mark; RFC 8259 (8.1) permits to ignore it


async def _read_in_time(receive: Receive, most: int) -> bytes:
    """A body of at most `most` bytes. Raises HttpError for a slow one."""
    try:
        async with asyncio.timeout(_BODY_SECONDS + most / _SLOWEST_BYTES_PER_SECOND):
            return await _read_all(receive)
    except TimeoutError:
        error = HttpError("The body did not arrive in time.", headers={"Connection": "close"})
        error.status = HTTPStatus.REQUEST_TIMEOUT
        raise error from None


async def _read_all(receive: Receive) -> bytes:
    body = bytearray()
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":  # a truncated body must not pass for a whole one
            raise HttpError("The connection ended before the request's body did.")
        body += message.get("body", b"")
        has_more = message.get("more_body", False)
    return bytes(body)


def _check_not_proxied(headers: Iterable[tuple[bytes, bytes]], local: Sequence[_Network]) -> None:
    """Refuse a reverse proxy's request unless all clients that its headers name are local."""
    for name, value in headers:
        if name in _FORWARDED_BY:
            is_local = False
        elif name in _CLIENT_HEADERS:
            clients = value.decode("latin-1").split(",")
            is_local = all(_is_local(client.strip(), local) for client in clients)
        else:
            continue
        if not is_local:
            raise ForbiddenOriginError(
                "Authentication is off, so that no proxy may forward clients of other machines: turn "
                "it on (docs/authentication.md), or list them in LLM_LOCAL_CLIENTS."
            )


def _is_local(client: str, local: Sequence[_Network]) -> bool:
    try:
        address = ip_address(client)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return any(address in network for network in local)


def _is_form(headers: dict[bytes, bytes]) -> bool:
    return headers.get(b"content-type", b"").strip().lower().startswith(b"multipart/form-data")


def _check_same_origin(headers: dict[bytes, bytes]) -> None:
    """Reject the form of another site's page, which needs no preflight."""
    origin = headers.get(b"origin")
    host = headers.get(b"host", b"").decode("latin-1")
    if origin is not None and origin.decode("latin-1").split("://", 1)[-1].lower() != host.lower():
        raise ForbiddenOriginError("Forms from another origin are rejected.")


async def _bounded(
    headers: dict[bytes, bytes], receive: Receive, bound: int, setting: str
) -> Receive:
    """Wrap `receive`: it raises BodyTooLargeError after more than `bound` bytes."""
    received = 0

    async def refuse(*, has_more: bool) -> NoReturn:
        if has_more:
            await _discard(receive)
        raise BodyTooLargeError(
            f"A body may have at most {bound} bytes ({setting}).", headers={"Connection": "close"}
        )

    async def counting() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > bound:
            await refuse(has_more=message.get("more_body", False))
        return message

    declared = headers.get(b"content-length", b"")
    if declared.isdigit() and int(declared) > bound:
        await refuse(has_more=b"expect" not in headers)  # with Expect, no body is sent yet

    return counting


async def _discard(receive: Receive) -> None:
    """Read the rest of a body, for a time: a client that still sends would not read the response."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_DISCARD_SECONDS):
            while (await receive()).get("more_body"):
                pass


def _host_name(value: str) -> str:
    host = value.split("://", 1)[-1].lower()
    if host.startswith("["):
        return host.split("]", 1)[0] + "]"
    return host.rsplit(":", 1)[0] if ":" in host else host


def _replay(body: bytes, receive: Receive) -> Receive:
    is_sent = False

    async def replay() -> Message:
        nonlocal body, is_sent
        if is_sent:
            return await receive()
        message = {"type": "http.request", "body": body, "more_body": False}
        body, is_sent = b"", True  # no other reference keeps it
        return message

    return replay
