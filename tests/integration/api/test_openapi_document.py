"""Requests made from the OpenAPI document by schemathesis: each response matches the document.

https://schemathesis.readthedocs.io: valid and invalid bodies, parameters and headers of every
operation, and sequences of operations; with authentication on, beside another team's rows. `FUZZ=20`
makes twenty times as many.
"""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.conftest import ROOT, Service
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import serve
from tests.unit.auth.test_jwt import sign

pytestmark = pytest.mark.trial  # thousands of requests

__all__ = ["guarded"]

TOKEN = sign({"team_id": "red", "token_id": "r", "scopes": ["use", "operate"]})
OTHER = sign({"team_id": "blue", "token_id": "b"})
HOOKS = "tests.integration.api.schemathesis_hooks"
FACTOR = int(os.environ.get("FUZZ", "1"))
EXAMPLES = 2 if FACTOR == 1 else 5 * FACTOR  # an operation's; `make soak` draws the many
CHECKS = (
    "no_foreign_rows",
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


async def rows_of_another_team(service: Service) -> list[str]:
    """Store a row of each kind; their ids, and a text that all of them have."""
    text, headers = secrets.token_hex(16), bearer(OTHER)
    path, messages = "/v1/responses", [{"role": "user", "content": text}]
    metadata = {"metadata": {"key": text}}
    bodies = (
        ("/contexts/", {"content": text} | metadata),
        ("/jobs", {"name": text, "key": text} | metadata),
        ("/results/", {"model": "scripted", "content": text} | metadata),
        ("/v1/chat/completions", {"model": "scripted", "messages": messages, "max_tokens": 2}),
        (path, {"model": "scripted", "input": text, "max_output_tokens": 2} | metadata),
        ("/v1/messages", {"model": "scripted", "messages": messages, "max_tokens": 2}),
    )
    ids = []
    for route, body in bodies:
        stored = await service.client.post(route, json=body, headers=headers)
        ids.append(stored.raise_for_status().json()["id"])
    params = {"model": "scripted", "messages": messages, "max_tokens": 2}
    batch = {"requests": [{"custom_id": text, "params": params}]}
    stored = await service.client.post("/v1/messages/batches", json=batch, headers=headers)
    ids.append(stored.raise_for_status().json()["id"])
    parts = {"file": (f"{text}.jsonl", json.dumps({"custom_id": text}).encode())}
    form = {"purpose": "batch"}
    file = await service.client.post("/v1/files", data=form, files=parts, headers=headers)
    ids.append(file.raise_for_status().json()["id"])
    return [text, *ids]


# Thirteen thousand requests: 190 s of a core, and twice as long where other processes have it, too.
@pytest.mark.timeout(600 * FACTOR)
@pytest.mark.soak
async def test_every_operation_keeps_to_the_document(guarded: Settings, tmp_path: Path) -> None:
    async with serve(guarded, with_worker=True) as service:
        foreign = json.dumps(await rows_of_another_team(service))
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{service.client.base_url}/openapi.json"),
            *("--header", f"Authorization: {bearer(TOKEN)['Authorization']}"),
            *("--checks", ",".join(CHECKS), "--max-examples", str(EXAMPLES)),
            # Unloading the model would end what the others are about.
            *("--exclude-path-regex", "load", "--request-timeout", "60"),
            cwd=tmp_path,
            env=os.environ
            | {"SCHEMATHESIS_HOOKS": HOOKS, "FOREIGN_TEXTS": foreign, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        if FACTOR > 1:
            print(output.decode()[-3000:])  # noqa: T201 # numbers of requests
        assert process.returncode == 0, output.decode()[-20_000:]
