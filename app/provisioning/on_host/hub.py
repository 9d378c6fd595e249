"""Requests to a hub of models, by the part of Hugging Face's HTTP API that a download uses."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

BLOCK_BYTES = 1 << 20
CHECKSUM = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # of Git, or SHA-256 of a large file
_TIMEOUT_SECONDS = 60.0
_MAX_LISTING_BYTES = 64_000_000
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})


class DownloadError(Exception):
    """The download ends; the message is for people."""


class UnavailableError(DownloadError):
    """Another download may succeed, at a later time."""


class BrokenError(Exception):
    """A connection or an answer that another attempt may improve, after `pause` seconds."""

    def __init__(self, problem: str, pause: float = 0.0) -> None:
        super().__init__(problem)
        self.pause = pause


@dataclass(frozen=True)
class Request:
    """`cache` is HF_HOME; `patterns` choose the files by name."""

    endpoint: str
    model: str
    revision: str
    cache: str
    patterns: list[str]
    connections: int = 4
    token: str | None = None


@dataclass(frozen=True)
class RemoteFile:
    """`etag` is the checksum of its bytes, and the name of its blob."""

    name: str
    size: int
    etag: str


class Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects; the token goes to the hub's own origin only."""

    max_redirections = 5

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        here, there = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if there.scheme not in ("https", here.scheme):
            raise DownloadError("The hub redirects to a connection without TLS.")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and (here.scheme, here.netloc) == (there.scheme, there.netloc):
            new.add_unredirected_header("Authorization", token)
        return new


def _is_loopback(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


class Hub:
    """HTTP requests for one model; refusals become messages."""

    def __init__(self, request: Request) -> None:
        self._request = request
        handlers: list[Any] = [Redirects]
        if _is_loopback(urllib.parse.urlsplit(request.endpoint).hostname):
            # A proxy would get the token in clear text.
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)

    def listing(self) -> dict[str, Any]:
        """The model's revision with its files. Raises as `open_file`; TypeError, ValueError for other bodies."""
        revision = urllib.parse.quote(self._request.revision, safe="")
        with self._open(f"api/models/{self._request.model}/revision/{revision}?blobs=true") as body:
            try:
                content = body.read(_MAX_LISTING_BYTES)
            except (OSError, http.client.HTTPException) as error:
                raise BrokenError(f"{self._request.endpoint}: the connection broke") from error
        answer = json.loads(content)
        if not isinstance(answer, dict):
            raise TypeError
        return answer

    def open_file(self, commit: str, name: str, offset: int) -> Any:
        """A file's bytes from an offset, as a response. Raises DownloadError and BrokenError."""
        path = f"{self._request.model}/resolve/{commit}/{urllib.parse.quote(name)}"
        return self._open(path, {"Range": f"bytes={offset}-"} if offset else {})

    def _open(self, path: str, headers: dict[str, str] | None = None) -> Any:
        url = f"{self._request.endpoint}/{path}"
        fixed = {"Accept-Encoding": "identity", "User-Agent": "llm-api-service"}
        request = urllib.request.Request(url, headers={**fixed, **(headers or {})})  # noqa: S310
        if self._request.token is not None:
            request.add_unredirected_header("Authorization", f"Bearer {self._request.token}")
        try:
            return self._opener.open(request, timeout=_TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            self._refuse(error, path.partition("?")[0])
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            raise BrokenError(f"{self._request.endpoint} cannot be reached: {reason}") from error

    def _refuse(self, error: urllib.error.HTTPError, path: str) -> NoReturn:
        with error:
            kind = error.headers.get("X-Error-Code", "")
            remark = error.headers.get("X-Error-Message", "")[:300]
            after = error.headers.get("Retry-After", "")
        model, endpoint = self._request.model, self._request.endpoint
        has_token = self._request.token is not None
        if error.code in _TRANSIENT:
            pause = float(after) if after.isdigit() else 0.0
            raise BrokenError(f"{endpoint} returned status {error.code}", pause)
        if kind == "GatedRepo" and not has_token:
            text = (
                f"{model} is a gated model: accept its terms at {endpoint}/{model}, then store a token of "
                "that account with `launch token set`."
            )
        elif kind == "GatedRepo":
            text = (
                f"{model} is a gated model, and the account of the stored token has no access to it: accept "
                f"its terms at {endpoint}/{model} with this account. Its authors may decide on each request. {remark}"
            )
        elif kind == "RevisionNotFound":
            text = f"{model} has no revision {self._request.revision!r}."
        elif error.code == 401 and has_token and kind != "RepoNotFound":
            text = (
                f"{endpoint} refuses the stored token: store a valid one with `launch token set`."
            )
        elif kind == "RepoNotFound" or error.code == 401:
            missing = "has no access to it" if has_token else "is missing (`launch token set`)"
            text = f"{endpoint} has no model {model}, or it is private and the token {missing}."
        else:
            text = f"{endpoint}/{path}: status {error.code} {remark}"
        raise DownloadError(text.rstrip())


def to_remote_file(entry: dict[str, Any]) -> RemoteFile:
    """A file of the hub's listing. Raises ValueError for a name or checksum that it cannot have."""
    large = entry.get("lfs") or {}
    name, size = str(entry["rfilename"]), int(large.get("size", entry["size"]))
    etag = str(large.get("sha256") or entry["blobId"])
    parts = name.split("/")
    if any(part in ("", ".", "..") or not part.isprintable() for part in parts) or size < 0:
        raise ValueError(name)
    if not CHECKSUM.fullmatch(etag):
        raise ValueError(etag)
    return RemoteFile(name, size, etag)


def checksum(file: Path, like: str) -> str:
    """SHA-256 of a file, or Git's name of it, which other files than large ones have."""
    digest = hashlib.sha256()
    if len(like) == 40:
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size)  # noqa: S324 - Git's
    with file.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()
