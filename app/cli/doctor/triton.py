"""Checks of the Triton servers and their models."""

import asyncio

from app.api.startup_checks import secret_weakness
from app.cli.doctor.findings import Finding, Level, ok, warn
from app.core.errors import ServiceError
from app.core.settings import Settings
from app.inference.server_store import ServerAddress
from app.inference.triton_client import IndexEntry, TritonClient
from app.inference.triton_exposure import open_http, open_protocols

_TRITON_TIMEOUT_SECONDS = 10.0  # seconds for one server to answer


async def check_triton(servers: list[ServerAddress], settings: Settings) -> list[Finding]:
    if not servers:
        to_do = "Set TRITON_GRPC_SERVICE, register a server, or launch one. Results wait meanwhile."
        return [warn("triton", "there is no server", to_do)]
    answers = await asyncio.gather(*map(_models_of, servers))
    is_any_up = any(not isinstance(answer, str) for answer in answers)
    findings = []
    ready = set[str]()
    for server, answer in zip(servers, answers, strict=True):
        address = server.grpc
        findings += await _access(server)
        if isinstance(answer, str):
            to_do = "Start it, or correct its address (Triton's gRPC port). Results wait meanwhile."
            level = Level.WARN if is_any_up else Level.FAIL
            findings.append(Finding("triton", level, f"{address}: {answer}", to_do))
            continue
        findings.append(ok("triton", f"{address}: answers"))
        ready |= {entry.name for entry in answer if entry.ready}
        for entry in answer:
            if not entry.ready and entry.reason not in ("", "unloaded"):
                text = f"{entry.name} on {address}: {entry.reason}"
                findings.append(warn("models", text, "Triton's log has the details."))
    if ready:
        findings.append(ok("models", f"ready: {', '.join(sorted(ready))}"))
    elif is_any_up:
        to_do = "Load one: POST /models/{name}/load. Results wait meanwhile."
        findings.append(warn("models", "none is ready", to_do))
    if settings.default_model is not None and is_any_up and settings.default_model not in ready:
        text = f"LLM_DEFAULT_MODEL={settings.default_model} is not ready"
        findings.append(warn("models", text, "Load it, or name another one."))
    return findings


async def _access(server: ServerAddress) -> list[Finding]:
    """Warn of ports whose clients need no secret: they can have the server run code."""
    protocols = await open_protocols(server.grpc)
    http = await open_http(server.grpc, server.http)
    to_do = "Start it as docs/servers.md describes, and set LLM_TRITON_SECRET or register it again."
    findings = []
    if weakness := server.secret and secret_weakness(server.secret):
        text = f"{server.grpc}: its secret {weakness}"
        advice = (
            "Make one with `openssl rand -hex 32`. Give it to the server, and set LLM_TRITON_SECRET "
            "or register the server again."
        )
        findings.append(warn("triton access", text, advice))
    found = [f"{server.grpc}: {', '.join(protocols)}"] if protocols else []
    found += [f"{http}: HTTP"] if http else []
    return findings + [
        warn("triton access", f"{one}: open to clients without a secret", to_do) for one in found
    ]


async def _models_of(server: ServerAddress) -> list[IndexEntry] | str:
    """The models of a server; or the reason why they are unknown."""
    try:
        async with (
            asyncio.timeout(_TRITON_TIMEOUT_SECONDS),
            TritonClient(server.grpc, server.secret) as client,
        ):
            return await client.index()
    except ServiceError as error:
        return error.detail
    except TimeoutError:
        return f"no answer within {_TRITON_TIMEOUT_SECONDS:.0f} s"
