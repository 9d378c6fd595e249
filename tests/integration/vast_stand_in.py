"""A stand-in for Vast.ai: its HTTP API as CLI 1.9.1 calls it, and an instance with a real sshd."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from app.cli.up.processes import free_port

API_KEY = "key-5f1d0c"
SSHD = "/usr/sbin/sshd"
CHEAP, FAIR, TAKEN, DEAR = 7001, 7002, 7003, 7004  # TAKEN: by another customer, a moment ago
_OFFERS = {CHEAP: 0.21, FAIR: 0.34, TAKEN: 0.4, DEAR: 1.9}  # $ an hour


@dataclass
class VastApi:
    """The requests it received, and the instances it rents."""

    ssh_port: int
    url: str = ""
    created: list[dict[str, Any]] = field(default_factory=list)
    searched: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)
    # So often an instance is still loading when it is looked at.
    loading: int = 1
    # Arguments of all processes at each creation.
    arguments: list[str] = field(default_factory=list)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, object]:
        """The status and the JSON of a call with a good key."""
        parts = path.strip("/").split("/")[2:]
        match method, parts:
            case "POST", ["bundles"]:
                self.searched.append(body)
                return 200, {"offers": self._find(body)}
            case "PUT", ["asks", offer]:
                return self._create(int(offer), body)
            case "GET", ["instances", "filters"]:
                return 200, {"filters": []}
            case "GET", ["instances"]:
                rows = list(self.rows.values())
                return 200, {"instances": rows, "next_token": None, "total_instances": len(rows)}
            case "GET", ["instances", contract]:
                return 200, {"instances": self._look(int(contract))}
            case "POST", ["ssh"]:
                self.keys.append(body["ssh_key"])
                return 200, {"success": True}
            case "DELETE", ["instances", contract] if int(contract) in self.rows:
                del self.rows[int(contract)]
                return 200, {"success": True}
        return 404, {"success": False, "error": "no_such_thing", "msg": "not found"}

    def rent(self, offer: int, label: str = "theirs") -> int:
        """Have an instance that runs, without the CLI."""
        contract = 91_000 + len(self.created) + len(self.rows)
        self.rows[contract] = {
            "id": contract,
            "actual_status": "running",
            "intended_status": "running",
            "status_msg": "success, running\n\x1b[31m",
            "label": label,
            "gpu_name": "RTX 4090",
            "num_gpus": 1,
            "dph_total": _OFFERS[offer],
            "image_uuid": "nvcr.io/nvidia/tritonserver",
            "start_date": time.time(),
            "extra_env": [],
            "public_ipaddr": "127.0.0.1 ",
            "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(self.ssh_port)}]},  # noqa: S104
            "ssh_host": "ssh5.vast.ai",
            "ssh_port": 1,
            "machine_id": 5,
        }
        return contract

    def _create(self, offer: int, body: Any) -> tuple[int, object]:
        if offer == TAKEN:
            return 410, {"success": False, "error": "no_such_ask", "msg": "not available\n"}
        self.arguments += [" ".join(process.cmdline()) for process in _processes()]
        self.created.append(body)
        contract = self.rent(offer, body["label"])
        row = self.rows[contract]
        row.update(actual_status="loading", status_msg="Pulling", image_uuid=body["image"])
        row["looks"] = self.loading
        return 200, {"success": True, "new_contract": contract}

    def _look(self, contract: int) -> dict[str, Any] | None:
        row = self.rows.get(contract)
        if row is not None and row.get("looks") is not None:
            row["looks"] -= 1
            if row["looks"] < 0:
                row["actual_status"] = "running"
        return row

    def _find(self, query: dict[str, Any]) -> list[dict[str, Any]]:
        wanted = query.get("id", {}).get("eq")
        at_most = float(query.get("dph_total", {}).get("lte", 1000))
        return [
            {
                "id": offer,
                "gpu_name": "RTX 4090",
                "num_gpus": 1,
                "gpu_ram": 24564,
                "dph_total": price,
                "reliability2": 0.998,
                "disk_space": 500.0,
                "geolocation": "Texas, US",
            }
            for offer, price in _OFFERS.items()
            if price <= at_most and wanted in (None, str(offer))
        ]


@contextlib.contextmanager
def serve_api(api: VastApi) -> Iterator[VastApi]:
    """The API on a port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
            pass

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            if self.headers.get("Authorization") == f"Bearer {API_KEY}":
                status, answer = api.answer(self.command, self.path.split("?")[0], body)
            else:
                status, answer = 401, {"success": False, "msg": "Invalid user key"}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PUT = do_DELETE = _handle  # noqa: N815 - as the base calls them

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    api.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield api
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def missing_programs() -> list[str]:
    """The programs that this machine lacks to be an instance."""
    missing = [name for name in ("make", "ssh", "ssh-keygen", "rsync") if not shutil.which(name)]
    if not Path(SSHD).exists():
        missing.append("sshd")
    if os.geteuid() != 0:
        missing.append("root (Vast.ai's login)")
    return missing


@contextlib.contextmanager
def run_sshd(folder: Path) -> Iterator[int]:
    """sshd on a port of 127.0.0.1 that takes the key `folder/key` (and not `folder/other`)."""
    for name in ("host", "key", "other"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    Path("/run/sshd").mkdir(exist_ok=True)
    port = free_port()
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1:{port}\nHostKey {folder / 'host'}\nPidFile none\n"
        f"AuthorizedKeysFile {folder / 'key.pub'}\nStrictModes no\nUsePAM no\n"
        "PasswordAuthentication no\nPermitRootLogin prohibit-password\n"
        # So bash does not read the user's ~/.bashrc, which may start programs.
        "SetEnv SHLVL=2\n"
    )
    with (folder / "sshd.log").open("w") as log:
        process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stderr=log)
    try:
        _wait_for_port(port, process)
        yield port
    finally:
        process.terminate()
        process.wait()


def _wait_for_port(port: int, process: "subprocess.Popen[bytes]") -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        assert process.poll() is None, "sshd has ended"
        time.sleep(0.1)
    raise AssertionError("sshd does not listen")


def _processes() -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            process.cmdline()
            yield process
