"""Download of a Hugging Face model into the cache of a profile, by a program on the profile's host.

The program (`on_host`), its request and the token are the standard input of one command: no argument, no
variable and no file on the host has the token.
"""

import contextlib
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson

from app.core.addresses import is_loopback
from app.core.settings.processes import HUGGING_FACE
from app.inference.model_repository import MODEL_FILES
from app.provisioning import patterns
from app.provisioning.hosts import HostError, Hosts
from app.provisioning.on_host import download, hub
from app.provisioning.profiles import Profile

_OLDEST_PYTHON = (3, 9)
_MODULES = (hub, download)
_PROGRAM = "import sys,json;exec(json.loads(sys.stdin.readline()))"
# Modules by their names in this service: they import each other by these.
_START = f"""import types
if sys.version_info < {_OLDEST_PYTHON}:
    sys.exit("Python {".".join(map(str, _OLDEST_PYTHON))} is needed: " + sys.executable + " is older")
for name, text in json.loads(sys.stdin.readline()):
    module = sys.modules[name] = types.ModuleType(name)
    exec(compile(text, name, "exec"), module.__dict__)
sys.exit(module.main())
"""
_PROXIES = re.compile(r"(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)", re.IGNORECASE)

# Called with the bytes that are there, and the total.
Report = Callable[[int, int], None]


class ModelDownloadError(Exception):
    """The model is not downloaded; the message is for people. Parts stay for another try."""


class ModelUnavailableError(ModelDownloadError):
    """Another download may succeed, at a later time: the hub cannot be reached, or the cache is in use."""


@dataclass(frozen=True, slots=True)
class Downloaded:
    """A complete snapshot. `received` are the bytes that this download fetched, of `total`."""

    commit: str
    snapshot: str
    files: int
    total: int
    received: int


async def download_model(
    hosts: Hosts,
    profile: Profile,
    model: str,
    revision: str = "main",
    *,
    endpoint: str = HUGGING_FACE,
    token: str | None = None,
    report: Report = lambda *_: None,
) -> Downloaded:
    """Download what the profile's cache lacks of a model. Raises ModelDownloadError and HostError."""
    request = _request(profile, model, revision, endpoint, token)
    sources = [[one.__name__, inspect.getsource(one)] for one in _MODULES]
    content = b"\n".join(map(orjson.dumps, (_START, sources, asdict(request))))
    environment = {name: value for name, value in os.environ.items() if _PROXIES.fullmatch(name)}
    command = [_python(profile), "-I", "-c", _PROGRAM]
    last: dict[str, Any] = {}
    lines = hosts.follow(profile, command, content=content, environment=environment)
    try:
        async with contextlib.aclosing(lines):
            async for line in lines:
                last = _parse(line) or last
                if "done" in last:
                    report(last["done"], last["total"])
    except HostError as error:
        if "error" not in last:
            raise HostError(f"The download on {_host(profile)} ended: {error}") from error
    if "commit" not in last:
        kind = ModelUnavailableError if last.get("is_transient") else ModelDownloadError
        text = last.get("error") or f"The download on {_host(profile)} ended early."
        raise kind(str(text).replace("\x00", "\ufffd"))
    return Downloaded(**last)


def _request(
    profile: Profile, model: str, revision: str, endpoint: str, token: str | None
) -> hub.Request:
    """The checked request. Raises ModelDownloadError."""
    if profile.cache is None:
        raise ModelDownloadError(f"The profile {profile.name} has no cache: add one to it.")
    if not patterns.is_model_id(model):
        raise ModelDownloadError("Name a model by its Hugging Face id, such as owner/name.")
    if not patterns.is_revision(revision):
        raise ModelDownloadError("Name a revision by its branch, tag or commit.")
    if token is not None and not _is_private(endpoint):
        raise ModelDownloadError(f"{endpoint} has no TLS: the stored token is not sent to it.")
    return hub.Request(endpoint, model, revision, profile.cache, list(MODEL_FILES), token=token)


def _python(profile: Profile) -> str:
    if profile.python is not None:
        return profile.python
    return f"{profile.venv}/bin/python" if profile.venv is not None else "python3"


def _parse(line: str) -> dict[str, Any]:
    """A message of the program; other lines are a shell's greetings."""
    try:
        message = orjson.loads(line)
    except orjson.JSONDecodeError:
        return {}
    return message if isinstance(message, dict) else {}


def _is_private(endpoint: str) -> bool:
    parts = urlsplit(endpoint)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def _host(profile: Profile) -> str:
    return profile.host or "this machine"
