"""A Hugging Face hub on loopback: listings, checksums, large files on a server of their own, tokens, ranges, faults."""

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
_BLOCK = 4096

# Called with a file's name and the number of its request (from 1); returns the fault, or "" for none.
Faults = Callable[[str, int], str]


class HuggingFaceHub:
    """Serves one model; its safetensors are large files, which are redirected to another origin.

    With `tokens`, only these open its files: others find a gated model, or with `is_private` none.
    `hold` stops each large file after this many of its bytes until `released` is set.
    """

    def __init__(
        self, name: str, files: Mapping[str, bytes], faults: Faults = lambda *_: ""
    ) -> None:
        self.name, self.files, self.faults = name, dict(files), faults
        self.tokens: set[str] | None = None
        self.known_tokens: set[str] = set()
        self.is_private = False
        self.former: str | None = None  # its name before, which is redirected
        self.hold: int | None = None
        self.held, self.released = threading.Event(), threading.Event()
        self.requests: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()  # bytes by file
        self.authorized_storage_requests = 0
        self.sizes: dict[str, int] = {}  # instead of the true ones in the listing
        self.lock = threading.Lock()
        self.storage = ""

    @contextmanager
    def run(self) -> Iterator[str]:
        """Serve it; yields its endpoint."""
        servers = [
            ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (kind,), {"hub": self}))
            for kind in (_Hub, _Storage)
        ]
        threads = [threading.Thread(target=one.serve_forever, args=(0.05,)) for one in servers]
        for thread in threads:
            thread.start()
        addresses = [f"http://127.0.0.1:{one.server_port}" for one in servers]
        self.storage = addresses[1]
        try:
            yield addresses[0]
        finally:
            self.released.set()
            for server, thread in zip(servers, threads, strict=True):
                server.shutdown()
                thread.join()
                server.server_close()

    def siblings(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, content in self.files.items():
            size = self.sizes.get(name, len(content))
            entry: dict[str, object] = {"rfilename": name, "size": size, "blobId": git_id(content)}
            if is_large(name):
                entry["lfs"] = {"sha256": sha256(content), "size": size, "pointerSize": 134}
            found.append(entry)
        return found

    def tree(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for one in self.siblings():
            large = one.get("lfs")
            entry = {
                "type": "file",
                "path": one["rfilename"],
                "size": one["size"],
                "oid": one["blobId"],
            }
            if isinstance(large, dict):
                entry["lfs"] = {"oid": large["sha256"], "size": large["size"], "pointerSize": 134}
            found.append(entry)
        return found

    @property
    def total_sent(self) -> int:
        return sum(self.sent.values())


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HuggingFaceHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def answer(self, status: int, headers: Mapping[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, name: str, headers: Mapping[str, str]) -> None:
        content = self.hub.files[name]
        with self.hub.lock:
            fault = ""
            if self.command == "GET":
                self.hub.requests[name] += 1
                fault = self.hub.faults(name, self.hub.requests[name])
        if fault.isdigit():
            self.answer(int(fault), {"Retry-After": "0"})
            return
        start = int(self.headers.get("Range", "bytes=0-")[6:].rstrip("-"))
        is_part = "Range" in self.headers and fault != "whole"
        body = content[start:] if is_part else content
        if fault == "altered":
            body = bytes(255 - one for one in body)
        self.send_response(206 if is_part else 200)
        for header, value in headers.items():
            self.send_header(header, value)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self._write(name, body[: len(body) // 2] if fault == "cut" else body)
        self.close_connection = fault == "cut"

    def _write(self, name: str, body: bytes) -> None:
        for place in range(0, len(body), _BLOCK):
            if is_large(name) and self.hub.hold is not None and place >= self.hub.hold:
                self.hub.held.set()
                self.hub.released.wait()
            block = body[place : place + _BLOCK]
            try:
                self.wfile.write(block)
            except ConnectionError:
                self.close_connection = True
                return
            with self.hub.lock:
                self.hub.sent[name] += len(block)


class _Hub(_Handler):
    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = hub.known_tokens | (hub.tokens or set())
        if hub.former is not None and hub.former in path:
            self.answer(307, {"Location": self.path.replace(hub.former, hub.name)})
        elif token and known and token not in known:
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif hub.name not in path or (hub.is_private and token not in (hub.tokens or set())):
            self.refuse(404 if token else 401, "RepoNotFound", "Repository not found")
        elif path.startswith(f"/api/models/{hub.name}/"):
            self._list(path)
        elif hub.tokens is not None and token not in hub.tokens:
            self.refuse(
                403 if token else 401, "GatedRepo", f"Access to model {hub.name} is restricted"
            )
        else:
            self._resolve(path)

    def _list(self, path: str) -> None:
        hub = self.hub
        revision = path.split("/")[6]
        if revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        with hub.lock:
            hub.requests["listing"] += 1
            fault = hub.faults("listing", hub.requests["listing"])
        if fault:
            self.answer(int(fault), {})
            return
        is_tree = f"/{hub.name}/tree/" in path
        body: object = (
            hub.tree() if is_tree else {"id": hub.name, "sha": COMMIT, "siblings": hub.siblings()}
        )
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, path: str) -> None:
        name = path.removeprefix(f"/{self.hub.name}/resolve/").partition("/")[2]
        content = self.hub.files.get(name)
        if content is None:
            self.refuse(404, "EntryNotFound", "Entry not found")
        elif is_large(name):
            linked = {
                "X-Repo-Commit": COMMIT,
                "X-Linked-Size": str(len(content)),
                "X-Linked-ETag": f'"{sha256(content)}"',
                "Location": f"{self.hub.storage}/{name}?signature=0",
            }
            self.answer(302, linked)
        else:
            self.send_file(name, {"X-Repo-Commit": COMMIT, "ETag": f'"{git_id(content)}"'})

    def refuse(self, status: int, code: str, message: str) -> None:
        self.answer(
            status,
            {"X-Error-Code": code, "X-Error-Message": message}
            if code
            else {"X-Error-Message": message},
        )


class _Storage(_Handler):
    """The origin of large files."""

    def do_GET(self) -> None:
        with self.hub.lock:
            self.hub.authorized_storage_requests += "Authorization" in self.headers
        self.send_file(unquote(urlsplit(self.path).path)[1:], {"ETag": '"of the storage"'})


def is_large(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git_id(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
