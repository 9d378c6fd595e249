"""The reverse proxy of docs/proxy.md: a real nginx with proxy/nginx.conf before API and web page."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from httpx_sse import aconnect_sse
from pydantic import SecretStr

from app.api.openai.files_router import FORM_BYTES
from app.core.settings import Settings
from app.ui.main import _MAX_FORM_BYTES, create_ui
from app.ui.pages import bulk
from app.ui.settings import UiSettings
from tests.conftest import ROOT, Service
from tests.integration.support import serve, serve_app, until
from tests.unit.api.test_startup_checks import STRONG
from tests.unit.auth.test_jwt import sign

CONFIGURATION = (ROOT / "proxy" / "nginx.conf").read_text()
TOKEN = {"Authorization": f"Bearer {sign({'team_id': 'red', 'token_id': 't1'})}"}
SLOW = "{{chunks=1000 delay_ms=50}}"


@dataclass
class Proxied:
    """The service behind nginx, and clients that speak to nginx."""

    behind: Service
    api: httpx.AsyncClient
    page: httpx.AsyncClient
    trust: ssl.SSLContext
    certificate: Path
    log: Path


def bound_of(path: str, server: int) -> int:
    """`client_max_body_size` of a path behind a port."""
    block = CONFIGURATION.split(f"listen {server} ")[1].split("\n    server {")[0]
    of_path = rf"location = {re.escape(path)} {{[^\n]*\n\s+client_max_body_size (\d+);"
    found = re.search(of_path, block) or re.search(r"client_max_body_size (\d+);", block)
    assert found
    return int(found[1])


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def make_certificate(directory: Path) -> None:
    """By the command in the document."""
    (directory / "proxy" / "tls").mkdir(parents=True)
    command = re.search(r"^openssl req .*$", (ROOT / "docs" / "proxy.md").read_text(), re.MULTILINE)
    assert command
    subprocess.run(command[0].split(), cwd=directory, check=True, capture_output=True)


def write_configuration(directory: Path, api: str, page: str, ports: dict[int, int]) -> Path:
    """The repository's file with this test's addresses."""
    text = CONFIGURATION
    changes = {" /var/cache/nginx/": f" {directory}/"}
    changes |= {f"listen {port}": f"listen 127.0.0.1:{ours}" for port, ours in ports.items()}
    changes |= {
        "api:8887": api,
        "ui:8888": page,
        "/etc/nginx/tls/": f"{directory}/proxy/tls/",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    file = directory / "nginx.conf"
    file.write_text(text)
    return file


@contextlib.asynccontextmanager
async def proxied(
    settings: Settings, directory: Path, api: str | None = None
) -> AsyncIterator[Proxied]:
    """API, worker and page, with nginx in front, which has `api` for the API's address."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("needs nginx")
    settings = settings.model_copy(update={"jwt_secret": SecretStr(STRONG)})
    make_certificate(directory)
    certificate, log = directory / "proxy" / "tls" / "certificate.pem", directory / "nginx.log"
    trust = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust.load_verify_locations(certificate)
    ports = {8080: free_port(), 8443: free_port(), 9443: free_port()}
    async with contextlib.AsyncExitStack() as stack:
        behind = await stack.enter_async_context(serve(settings, with_worker=True))
        ui = create_ui(UiSettings.model_validate({"api_url": str(behind.client.base_url)}))
        page = await stack.enter_async_context(serve_app(ui))
        address = api or behind.client.base_url.netloc.decode()
        file = write_configuration(directory, address, page.removeprefix("http://"), ports)
        user = (
            "user root; " if os.geteuid() == 0 else ""
        )  # others may not read the test's directory
        command = [nginx, "-e", "stderr", "-c", str(file), "-g"]
        checked = subprocess.run(
            [*command, user, "-t"], capture_output=True, text=True, check=False
        )
        assert checked.returncode == 0, checked.stderr
        with log.open("wb") as output:
            process = subprocess.Popen(
                [*command, f"{user}daemon off;"], stdout=output, stderr=output
            )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        clients = [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=f"https://localhost:{ports[port]}", verify=trust, timeout=60
                )
            )
            for port in (9443, 8443)
        ]

        async def answers() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                answer = await clients[0].get("/health", headers=TOKEN)
                return answer.status_code == 200 or api is not None
            assert process.poll() is None, log.read_text()
            return False

        await until(answers)
        yield Proxied(behind, clients[0], clients[1], trust, certificate, log)


async def test_streams_and_long_polls_pass_as_they_come(settings: Settings, tmp_path: Path) -> None:
    async with proxied(settings, tmp_path) as proxy:
        body = {"model": "scripted", "content": SLOW}
        made = (await proxy.api.post("/results/", json=body, headers=TOKEN)).json()
        path = f"/results/{made['id']}"
        poll = asyncio.create_task(proxy.api.get(path, params={"wait": 60}, headers=TOKEN))
        async with aconnect_sse(proxy.api, "GET", f"{path}/stream", headers=TOKEN) as source:
            deltas, states = 0, []
            async for event in source.aiter_sse():
                deltas += event.event == "delta"
                # It would go on for 50 seconds: what has come by now was not held back.
                if event.event == "delta" and deltas == 3:
                    assert not poll.done()
                    await proxy.api.post(f"{path}/cancel", headers=TOKEN)
                if "state" in (data := json.loads(event.data)):
                    states.append(data["state"])
        assert deltas >= 3
        assert states[-1] == "failed"
        assert (await poll).json()["error"]["code"] == "cancelled"

        # OpenAI's streams, too, and tickets, which leave no trace in the log.
        ticket = (await proxy.api.post(f"{path}/stream-ticket", headers=TOKEN)).json()["ticket"]
        assert "failed" in (await proxy.api.get(f"{path}/stream", params={"ticket": ticket})).text
        chat = {"model": "scripted", "stream": True, "messages": [{"role": "user", "content": "x"}]}
        async with proxy.api.stream(
            "POST", "/v1/chat/completions", json=chat, headers=TOKEN
        ) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert (await answer.aread()).endswith(b"data: [DONE]\n\n")
        log = proxy.log.read_text()
        assert f"GET {path}/stream 200" in log
        assert ticket not in log
        assert "ticket" not in log.replace("stream-ticket", "")


@pytest.mark.trial
async def test_tls_headers_and_bounds(settings: Settings, tmp_path: Path) -> None:
    async with proxied(settings, tmp_path) as proxy:
        curl = ["curl", "-sS", "--cacert", str(proxy.certificate), "-o", "/dev/null", "-w"]
        for options in (["--http2"], ["--http1.1"]):
            version = await asyncio.to_thread(
                subprocess.run,
                [
                    *curl,
                    "%{http_version} %{http_code}",
                    *options,
                    str(proxy.page.base_url.join("/sign-in")),
                ],
                capture_output=True,
                text=True,
                check=True,
            )
            assert version.stdout == f"{options[0].removeprefix('--http')} 200"

        reported = [await proxy.api.get("/health"), await proxy.page.get("/sign-in")]
        for answer in reported:
            assert answer.headers["server"] == "nginx"  # no version
            names = [name.lower() for name, _ in answer.headers.raw]
            assert len(names) == len(set(names)), names
            assert answer.headers["strict-transport-security"]
        assert "content-security-policy" in reported[1].headers

        # The cookie is for https alone: the page knows that its visitor came by it.
        form = {"token": TOKEN["Authorization"].removeprefix("Bearer ")}
        entered = await proxy.page.post("/sign-in", data=form)
        assert entered.status_code == 303
        assert "Secure" in entered.headers["set-cookie"]
        assert (await proxy.page.get("/playground")).status_code == 200

        # Bodies: the largest that the API takes passes; one byte more is nginx's to refuse.
        most = Settings.model_fields["max_body_bytes"].default
        largest = ('{"content":"%s"}' % ("x" * (most - len('{"content":""}')))).encode()
        as_json = TOKEN | {"Content-Type": "application/json"}
        taken = await proxy.api.post("/contexts/", content=largest, headers=as_json)
        assert taken.status_code == 201, taken.text[:200]
        refused = await proxy.api.post("/contexts/", content=largest + b" ", headers=as_json)
        assert refused.status_code == 413
        assert refused.json()["code"] == "body_too_large"
        assert refused.headers["content-type"] == "application/problem+json"
        uploaded = await proxy.api.post(
            "/v1/files", data={"purpose": "batch"}, files={"file": ("a.jsonl", b"{}\n")}, headers=TOKEN
        )  # fmt: skip
        assert uploaded.status_code == 200, uploaded.text
        for client, path in ((proxy.api, "/v1/files"), (proxy.page, "/bulk/files")):
            assert await status_of_announced(proxy, client, path, 200_065_537) == 413


async def test_an_unavailable_api_is_reported_as_503(settings: Settings, tmp_path: Path) -> None:
    async with proxied(settings, tmp_path, api=f"127.0.0.1:{free_port()}") as proxy:
        for method in ("GET", "POST"):
            answer = await proxy.api.request(method, "/results/", headers=TOKEN)
            assert answer.status_code == answer.json()["status"] == 503
            assert answer.json()["code"] == "api_unavailable"
            assert answer.headers["retry-after"] == "5"


@pytest.mark.trial
async def test_strangers_and_sign_ins_are_slowed(settings: Settings, tmp_path: Path) -> None:
    async with proxied(settings, tmp_path) as proxy:
        form = {"token": "wrong"}
        statuses = [(await proxy.page.post("/sign-in", data=form)).status_code for _ in range(3)]
        assert statuses == [401] * 3

        async def is_slowed() -> bool:
            answer = await proxy.page.post("/sign-in", data=form)
            return answer.status_code == 429 and "retry-after" in answer.headers

        await until(is_slowed)
        assert (await proxy.page.get("/sign-in")).status_code == 200

        async def are_slowed() -> bool:
            answers = await asyncio.gather(*(proxy.api.get("/results/") for _ in range(200)))
            assert {answer.status_code for answer in answers} <= {401, 429}
            slowed = [answer for answer in answers if answer.status_code == 429]
            assert all(answer.json()["code"] == "too_many_requests" for answer in slowed)
            assert all(answer.headers["retry-after"] for answer in slowed)
            return bool(slowed)

        await until(are_slowed)
        answers = await asyncio.gather(
            *(proxy.api.get("/results/", headers=TOKEN) for _ in range(200))
        )
        assert {answer.status_code for answer in answers} == {200}


def test_the_bounds_are_the_services_own() -> None:
    api, page = Settings.model_fields, UiSettings.model_fields
    assert bound_of("/", 9443) == api["max_body_bytes"].default
    assert bound_of("/v1/files", 9443) == api["max_file_bytes"].default + FORM_BYTES
    assert bound_of("/", 8443) == _MAX_FORM_BYTES
    assert bound_of(bulk.UPLOADS, 8443) == page["max_upload_bytes"].default + bulk.FORM_BYTES
    read_timeout = re.search(r"proxy_read_timeout (\d+)h;", CONFIGURATION)
    longest = next(m.le for m in api["max_wait_seconds"].metadata if hasattr(m, "le"))
    assert read_timeout
    assert int(read_timeout[1]) * 3600 > longest
    kept = [
        int(seconds)
        for seconds in re.findall(r"^ {8}keepalive_timeout (\d+)s;", CONFIGURATION, re.M)
    ]
    assert len(kept) == 2
    for fields in (api, page):
        assert fields["idle_connection_seconds"].default > 2 * max(kept)


async def status_of_announced(
    proxy: Proxied, client: httpx.AsyncClient, path: str, length: int
) -> int:
    """The response to a client that declares the length of its body, and has not begun to send it."""
    reader, writer = await asyncio.open_connection(
        "localhost", client.base_url.port, ssl=proxy.trust
    )
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {TOKEN['Authorization']}\r\n"
        f"Content-Type: multipart/form-data; boundary=b\r\nContent-Length: {length}\r\n\r\n".encode()
    )
    status = int((await reader.readline()).split()[1])
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return status
