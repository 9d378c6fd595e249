"""Checks of the Triton servers and their models."""

import asyncio

from app.cli.doctor.findings import Finding, Level, ok, warn
from app.core.errors import ServiceError
from app.core.settings import Settings
from app.inference.triton_client import IndexEntry, TritonClient

_TRITON_TIMEOUT_SECONDS = 10.0  # seconds for one server to answer


async def check_triton(addresses: list[str], settings: Settings) -> list[Finding]:
    if not addresses:
        to_do = "Set TRITON_GRPC_SERVICE, register a server, or launch one. Results wait meanwhile."
        return [warn("triton", "there is no server", to_do)]
    answers = await asyncio.gather(*(_models_of(address) for address in addresses))
    is_any_up = any(not isinstance(answer, str) for answer in answers)
    findings = []
    ready = set[str]()
    for address, answer in zip(addresses, answers, strict=True):
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


async def _models_of(address: str) -> list[IndexEntry] | str:
    """The models of a server; or the reason why they are unknown."""
    try:
        async with asyncio.timeout(_TRITON_TIMEOUT_SECONDS), TritonClient(address) as client:
            return await client.index()
    except ServiceError as error:
        return error.detail
    except TimeoutError:
        return f"no answer within {_TRITON_TIMEOUT_SECONDS:.0f} s"
