"""Guard against server-side request forgery (SSRF) by URLs of clients: webhooks, images.

The API checks a URL when it accepts it; the caller resolves its name once, checks every address, and
connects to a checked address, so that a name which resolves differently a moment later is harmless.
"""

import asyncio
import re
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

import httpx

# (host, port) -> rows whose last member begins with an address: `socket.getaddrinfo`.
Lookup = Callable[..., list[tuple[Any, ...]]]

_PORTS = {"http": 80, "https": 443}
_MAX_PORT = 65_535
_MAX_ADDRESSES = 4
_NAME = re.compile(r"(?=.{1,253}$)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_GLOBAL_UNICAST = ip_network("2000::/3")
# Not public, although some versions of `ipaddress` report it so: Azure's host agent, protocol
# assignments, 6to4 relays, documentation.
_NOT_PUBLIC = tuple(
    ip_network(network)
    for network in ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "3fff::/20")
)
_NAT64 = ip_network("64:ff9b::/96")


class RefusedTargetError(Exception):
    """Forbidden target; the message names the reason."""


@dataclass(slots=True, frozen=True)
class UrlRules:
    """Targets of one kind of URL; `permit` is the setting that allows private ones."""

    allow_private: bool
    permit: str

    def private(self, fault: str) -> str:
        return f"{fault}; {self.permit} permits it"


def webhook_rules(*, allow_private: bool) -> UrlRules:
    return UrlRules(allow_private, "LLM_WEBHOOK_ALLOW_PRIVATE=true")


def url_fault(url: str, rules: UrlRules) -> str | None:
    """Describe the fault of a URL, checked without DNS; None if it has none."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        return f"is not a URL: {error}"
    if parsed.scheme not in _PORTS:
        return "must begin with http:// or https://"
    if parsed.userinfo:
        return "must not hold a user or a password"
    if not 0 < _port_of(parsed) <= _MAX_PORT:
        return f"the port must be 1 to {_MAX_PORT}"
    host = _host_of(parsed)
    literal = _to_literal(host)
    if "%" in host or (literal is None and not _NAME.fullmatch(host)):
        return "has no valid host"
    if rules.allow_private:
        return None
    if host == "localhost" or host.endswith(".localhost"):
        return rules.private(f"{host} is this machine itself")
    if literal is not None and not is_public(literal):
        return rules.private(f"{literal} is not a public address")
    return None


async def resolve(url: httpx.URL, lookup: Lookup, executor: Executor, rules: UrlRules) -> list[str]:
    """Resolve the checked addresses to call, in order.

    Raises RefusedTargetError if one of them is forbidden, and OSError if the name is unknown.
    """
    host, port = _host_of(url), _port_of(url)
    # On threads of its own: a nameserver that hangs must not block other lookups of the service.
    found = await asyncio.get_running_loop().run_in_executor(
        executor, lambda: lookup(host, port, type=socket.SOCK_STREAM)
    )
    addresses = list(dict.fromkeys(str(row[-1][0]) for row in found))
    for address in addresses:
        if not rules.allow_private and not is_public(ip_address(address)):
            raise RefusedTargetError(rules.private(f"{host} is {address}, not a public address"))
    return addresses[:_MAX_ADDRESSES]


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Return whether an address, and the IPv4 address embedded in it, is public."""
    if any(address in network for network in _NOT_PUBLIC):
        return False
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    if address.ipv4_mapped is not None:
        return is_public(address.ipv4_mapped)
    if address in _NAT64:
        return is_public(IPv4Address(int(address) & 0xFFFF_FFFF))
    if address.sixtofour is not None and not is_public(address.sixtofour):
        return False
    return address.is_global and address in _GLOBAL_UNICAST


def _host_of(url: httpx.URL) -> str:
    return url.raw_host.decode().lower().removesuffix(".")


def _port_of(url: httpx.URL) -> int:
    return _PORTS[url.scheme] if url.port is None else url.port


def _to_literal(host: str) -> IPv4Address | IPv6Address | None:
    """Parse an address in each form that the resolver accepts without DNS: 127.1, 0x7f.1."""
    try:
        return ip_address(host)
    except ValueError:
        pass
    try:
        return IPv4Address(socket.inet_aton(host))
    except OSError:
        return None
