"""Code execution by Triton's own control: a model whose code comes with the request to load it."""

import base64
import contextlib
import json
from pathlib import Path
from runpy import run_path
from uuid import UUID

import grpc
import httpx
import psutil
import pytest
from tritonclient.grpc import service_pb2 as pb, service_pb2_grpc

from app.cli.doctor.command import examine
from app.cli.doctor.findings import Level
from app.cli.up.processes import free_port
from app.cli.up.triton import EmbeddedTriton
from app.core.errors import TritonUnavailableError
from app.core.settings import Settings
from app.core.settings.fields import DEFAULT_TEAM
from app.inference.triton_access import KEY, RESTRICTED, restriction
from app.inference.triton_client import TritonClient
from app.inference.triton_errors import NotTakenError
from tests.conftest import ROOT, SCRIPTED, TRITON_VENV, make_settings, run_service
from tests.integration.launching import EMBEDDED, launch, stop, until_state, with_profiles
from tests.integration.support import finish
from tests.postgres import PostgresServer

CONFIG = {
    "backend": "python",
    "input": [{"name": "a", "data_type": "TYPE_BOOL", "dims": [1]}],
    "output": [{"name": "b", "data_type": "TYPE_BOOL", "dims": [1]}],
}
CODE = """
class TritonPythonModel:
    def initialize(self, args):
        open({trace!r}, "w").close()
"""


def ports_of(address: str) -> set[int]:
    """All ports that the server with this gRPC address listens on."""
    grpc_port = int(address.rpartition(":")[2])
    listening = [
        (one.pid, one.laddr.port)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr
    ]
    (server,) = {pid for pid, port in listening if port == grpc_port}
    return {port for pid, port in listening if pid == server}


async def load_by_http(port: int, code: bytes) -> None:
    """A POST without a header of its own, as a page in a browser sends it."""
    parameters = {"config": json.dumps(CONFIG), "file:1/model.py": base64.b64encode(code).decode()}
    async with httpx.AsyncClient(timeout=30) as client:
        with contextlib.suppress(httpx.HTTPError):
            await client.post(
                f"http://127.0.0.1:{port}/v2/repository/models/by_http/load",
                content=json.dumps({"parameters": parameters}),
            )


async def load_by_grpc(port: int, code: bytes) -> None:
    request = pb.RepositoryModelLoadRequest(model_name="by_grpc")
    request.parameters["config"].string_param = json.dumps(CONFIG)
    request.parameters["file:1/model.py"].bytes_param = code
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await stub.RepositoryModelLoad(request, timeout=30)


async def test_no_port_of_the_server_loads_a_strangers_code_by_http(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for port in ports_of(triton.address("grpc")):
        await load_by_http(port, CODE.format(trace=str(trace)).encode())
    assert not trace.exists()


async def test_no_port_of_the_server_loads_a_strangers_code_by_grpc(
    triton: EmbeddedTriton, tmp_path: Path
) -> None:
    trace = tmp_path / "trace"
    for port in ports_of(triton.address("grpc")):
        await load_by_grpc(port, CODE.format(trace=str(trace)).encode())
    assert not trace.exists()


async def test_the_services_client_loads_and_unloads(triton: EmbeddedTriton) -> None:
    async with triton.client() as client:
        await client.load("scripted")
        assert "scripted" in {entry.name for entry in await client.index() if entry.ready}
        await client.unload("by_grpc")


async def test_a_client_with_another_secret_is_refused(triton: EmbeddedTriton) -> None:
    async with TritonClient(triton.address("grpc"), "another-secret") as client:
        assert await client.is_live()  # health is open: probes of Kubernetes have no secret
        for call in (client.index(), client.load("scripted"), client.request_count("scripted")):
            with pytest.raises(TritonUnavailableError, match="LLM_TRITON_SECRET"):
                await call
        with pytest.raises(NotTakenError, match="restricted"):
            async for _ in client.generate("scripted", "a", {"max_tokens": 1}):
                pass


def test_the_supervisor_restricts_as_the_service_does() -> None:
    """It runs beside servers elsewhere, without the service's code."""
    there = run_path(str(ROOT / "triton" / "health" / "access.py"))
    http = f"--http-restricted-api={RESTRICTED}:{KEY}=s"
    assert there["restrict"](["tritonserver"], "s") == ["tritonserver", restriction("s"), http]
    assert there["restrict"](["tritonserver"], "") == ["tritonserver"]


class Open(EmbeddedTriton):
    """A server without restrictions, as operators have started them."""

    http_port = 0

    def _options(self) -> list[str]:
        closed = ("--allow-http", "--grpc-restricted-protocol")
        options = [one for one in super()._options() if not one.startswith(closed)]
        return [*options, "--http-address=127.0.0.1", f"--http-port={self.http_port}"]


@pytest.mark.trial
async def test_an_open_server_works_as_before_and_doctor_warns_of_it(
    postgres_server: PostgresServer, database_name: str, tmp_path: Path
) -> None:
    """It takes seconds: the server has to start."""
    server = Open(TRITON_VENV, tmp_path / "work", SCRIPTED, tmp_path / "log")
    server.http_port = free_port()
    await server.start()
    try:
        changes = {"triton_http": f"127.0.0.1:{server.http_port}", "triton_secret": None}
        settings = make_settings(postgres_server, database_name, server, **changes)
        findings = [one for one in await examine(settings) if one.part == "triton access"]
        async with run_service(settings, with_worker=True) as service:
            assert (await finish(service, "{{text=one}}"))["state"] == "completed"
    finally:
        await server.stop()
    grpc_port, http_port = findings
    for protocol in ("model-repository", "shared-memory", "trace", "logging"):
        assert protocol in grpc_port.found
    assert settings.triton_http in http_port.found
    assert {one.level for one in findings} == {Level.WARN}


@pytest.mark.trial
async def test_a_launched_server_has_a_secret_that_nothing_shows(
    settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes seconds: a supervised job has to start its server."""
    caplog.set_level("DEBUG")
    profile = f'[profiles.local]\nprovider = "local"\nhome = "HOME"\n{EMBEDDED}'
    settings = with_profiles(settings, tmp_path, profile)
    async with run_service(settings, with_worker=True) as service:
        launched = (await launch(service))["id"]
        address = (await until_state(service, launched, "healthy"))["server"]["grpc"]
        secret = (await service.services.launches.get(DEFAULT_TEAM, UUID(launched))).secret
        trace = tmp_path / "trace"
        code = CODE.format(trace=str(trace)).encode()
        ports = ports_of(address)
        assert len(ports) == 3  # HTTP's is the supervisor's
        for port in ports:
            await load_by_http(port, code)
            await load_by_grpc(port, code)
        assert not trace.exists()
        places = ("/launches", f"/launches/{launched}", f"/launches/{launched}/log", "/servers")
        shown = [(await service.client.get(place)).text for place in places]
        script = (tmp_path / "home" / "launches" / launched / "job.sh").read_text()
        await stop(service, launched)
    assert secret
    assert not [text for text in (*shown, script, caplog.text) if secret in text]
