"""Scope that each path needs: the only table of open paths and of operators' paths.

All other paths need a token with the scope `use`, including paths that do not exist, so that a client
without a token cannot probe them.
"""

import re
from urllib.parse import parse_qs

from app.auth.principal import Scope

_READS = frozenset({"GET", "HEAD"})

# Liveness and documentation; none of them reveals a team's rows.
OPEN_PATHS = frozenset(
    {
        "/",  # TGI's, as /ping: the same as /health
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
_INFO = "/info"
_ASSETS = "/static-offline-docs/"

# An EventSource cannot send headers; the route redeems the ticket, which belongs to the result's team.
_STREAM = re.compile(r"/results/[^/]+/stream")

_OPERATOR = re.compile(
    r"/models/[^/]+/(load|unload)|/servers(/.*)?|/launches(/.*)?|/metrics|/system"
)
# Readable for every client.
_LAUNCHES_READ = re.compile(r"/launches(/catalogue|/profiles|/downloads/[^/]+|/[^/]+)?")
_PLAN = "/launches/plan"  # stores nothing


def needed_scope(method: str, path: str, query: bytes) -> Scope | None:
    if path == _INFO and b"model" in query:
        return "use"  # its answer shows which models exist
    if method in _READS and (path in OPEN_PATHS or path.startswith(_ASSETS)):
        return None
    if method in _READS and _STREAM.fullmatch(path) and b"ticket" in query:
        return None if "ticket" in parse_qs(query.decode("latin-1")) else "use"
    if method in _READS and _LAUNCHES_READ.fullmatch(path):
        return "use"
    if method == "POST" and path == _PLAN:
        return "use"
    return "operate" if _OPERATOR.fullmatch(path) else "use"
