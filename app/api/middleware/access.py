"""What a request needs to be let in: the one table of paths that are open, or an operator's.

Everything else needs a token with the scope `use`, also paths that do not exist: a stranger learns
nothing about them.
"""

import re
from urllib.parse import parse_qs

from app.auth.principal import Scope

_READS = frozenset({"GET", "HEAD"})

# What tells that the service is there, and how to use it. No team's rows, and nothing about them.
OPEN_PATHS = frozenset(
    {
        "/",  # TGI's, as the next one: the same as /health
        "/ping",
        "/health",
        "/health/live",
        "/health/ready",
        "/info",
        "/docs",
        "/docs/errors",
        "/docs/oauth2-redirect",
        "/openapi.json",
    }
)
_ASSETS = "/static-offline-docs/"

# An EventSource can send no header; the route redeems the ticket, which is of one result's team.
_STREAM = re.compile(r"/results/[^/]+/stream")

_OPERATOR = re.compile(
    r"/models/[^/]+/(load|unload)|/servers(/.*)?|/launches(/.*)?|/metrics|/system"
)
# What there is to choose from, and what was chosen: for all.
_LAUNCHES_READ = re.compile(r"/launches(/catalogue|/profiles|/[^/]+)?")
_PLAN = "/launches/plan"  # stores nothing


def needed_scope(method: str, path: str, query: bytes) -> Scope | None:
    """The scope that a request needs; None if it may come without a token."""
    if method in _READS and (path in OPEN_PATHS or path.startswith(_ASSETS)):
        return None
    if method in _READS and _STREAM.fullmatch(path) and b"ticket" in query:
        return None if "ticket" in parse_qs(query.decode("latin-1")) else "use"
    if method in _READS and _LAUNCHES_READ.fullmatch(path):
        return "use"
    if method == "POST" and path == _PLAN:
        return "use"
    return "operate" if _OPERATOR.fullmatch(path) else "use"
