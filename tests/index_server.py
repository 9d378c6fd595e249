"""A local server of published files: S3's public listing, ranges, and faults by request."""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

PREFIX = "index/v4 made&up"  # as its keys may be
_PAGE = 4

# Called with a file's name and the number of its request (from 1); returns the fault, or "" for none.
Faults = Callable[[str, int], str]


class IndexServer:
    """Serves the files of a directory below /bucket/PREFIX/, and below /plain/ without a listing."""

    def __init__(self, directory: Path, faults: Faults = lambda *_: "") -> None:
        self.directory = directory
        self.faults = faults
        self.requests: Counter[str] = Counter()
        self.ranges: list[tuple[str, int]] = []
        self.sent_bytes = 0
        self.seconds_per_block = 0.0
        self.hidden: set[str] = set()
        self.lock = threading.Lock()

    @contextmanager
    def run(self) -> Iterator[str]:
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), type("Handler", (_Handler,), {"state": self})
        )
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def listing(self, query: dict[str, list[str]]) -> bytes:
        prefix = query["prefix"][0]
        files = sorted(one for one in self.directory.iterdir() if one.name not in self.hidden)
        start = int(query.get("continuation-token", ["0"])[0])
        page = files[start : start + _PAGE] if prefix == f"{PREFIX}/" else []
        entries = "".join(
            f"<Contents><Key>{escape(prefix + one.name)}</Key><Size>{one.stat().st_size}</Size>"
            f"<ETag>{escape(self.etag(one))}</ETag></Contents>"
            for one in page
        )
        more = start + _PAGE < len(files) and page
        token = f"<NextContinuationToken>{start + _PAGE}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"{entries}{token}</ListBucketResult>"
        ).encode()

    @staticmethod
    def etag(file: Path) -> str:
        return f'"{hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: IndexServer

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        file = self.state.directory / self.path.rpartition("/")[2]
        if not file.exists() or file.name in self.state.hidden:
            self._empty(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.send_header("ETag", self.state.etag(file))
        self.end_headers()

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        if parts.query:
            self._list(parse_qs(parts.query))
            return
        file = self.state.directory / parts.path.rpartition("/")[2]
        with self.state.lock:
            self.state.requests[file.name] += 1
            fault = self.state.faults(file.name, self.state.requests[file.name])
        if fault.isdigit():
            self._empty(int(fault))
            return
        self._file(file, fault)

    def _list(self, query: dict[str, list[str]]) -> None:
        with self.state.lock:
            self.state.requests["list"] += 1
            fault = self.state.faults("list", self.state.requests["list"])
        if fault.isdigit():
            self._empty(int(fault))
            return
        body = self.state.listing(query)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _file(self, file: Path, fault: str) -> None:
        content = file.read_bytes()
        asked = self.headers.get("Range", "bytes=0-")
        start = int(asked.removeprefix("bytes=").rstrip("-"))
        is_part = "Range" in self.headers and fault != "whole"
        if self.headers.get("If-Range", self.state.etag(file)) != self.state.etag(file):
            is_part = False
        body = content[start:] if is_part else content
        if fault == "altered":
            body = bytes(255 - one for one in body)
        with self.state.lock:
            self.state.ranges.append((file.name, start if is_part else 0))
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", self.state.etag(file))
        claimed = len(body) // 2 if fault == "short" else len(body)
        self.send_header("Content-Length", str(claimed))
        self.end_headers()
        self._send(body[: len(body) // 2] if fault in ("cut", "short", "whole cut") else body)
        if fault == "cut":
            self.close_connection = True

    def _send(self, body: bytes) -> None:
        for place in range(0, len(body), 4096):
            block = body[place : place + 4096]
            try:
                self.wfile.write(block)
            except ConnectionError:
                self.close_connection = True
                return
            with self.state.lock:
                self.state.sent_bytes += len(block)
            time.sleep(self.state.seconds_per_block)

    def _empty(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
