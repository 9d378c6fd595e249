"""A hub of models on loopback: the part of Hugging Face's HTTP API that a download uses."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "c0ffee" + "0" * 34


class ModelHub(ThreadingHTTPServer):
    """Serves one repository; `fetched` names the files that were sent."""

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.name, self.files = name, files
        self.fetched: list[str] = []


@contextlib.contextmanager
def model_hub(name: str, files: Mapping[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serve one repository; yields its endpoint, and the files that were fetched."""
    server = ModelHub(name, files)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", server.fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: ModelHub

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub = self.server
        path = self.path.partition("?")[0]
        if path.startswith(f"/api/models/{hub.name}/tree/"):
            self.answer([entry(file, content) for file, content in hub.files.items()])
        elif path.startswith(f"/api/models/{hub.name}"):
            siblings = [{"rfilename": file} for file in hub.files]
            self.answer({"id": hub.name, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(f"/{hub.name}/resolve/") and path.split("/")[-1] in hub.files:
            self.send_file(path.split("/")[-1])
        else:
            self.send_error(404)

    def send_file(self, file: str) -> None:
        content = self.server.files[file]
        if self.command == "GET":
            self.server.fetched.append(file)
        self.send(content, {"ETag": f'"{oid(content)}"'})

    def answer(self, body: object) -> None:
        self.send(json.dumps(body).encode(), {"Content-Type": "application/json"})

    def send(self, content: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(200)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


def entry(file: str, content: bytes) -> dict[str, object]:
    """A file as the hub lists it."""
    return {"type": "file", "path": file, "size": len(content), "oid": oid(content)}


def oid(content: bytes) -> str:
    """Git's name of a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # noqa: S324
