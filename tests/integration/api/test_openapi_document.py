"""Requests made from the OpenAPI document by schemathesis: each response matches the document.

https://schemathesis.readthedocs.io: valid and invalid bodies, parameters and headers of every
operation, and sequences of operations; with authentication on.
"""

import asyncio
import contextlib
import sys
from pathlib import Path

import pytest

from app.core.settings import Settings
from tests.integration.auth.test_auth import bearer, guarded
from tests.integration.support import serve
from tests.unit.auth.test_jwt import sign

__all__ = ["guarded"]

TOKEN = sign({"team_id": "red", "token_id": "r", "scopes": ["use", "operate"]})
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@pytest.mark.timeout(300)  # thousands of requests
async def test_every_operation_keeps_to_the_document(guarded: Settings, tmp_path: Path) -> None:
    async with serve(guarded, with_worker=True) as service:
        process = await asyncio.create_subprocess_exec(
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{service.client.base_url}/openapi.json"),
            *("--header", f"Authorization: {bearer(TOKEN)['Authorization']}"),
            *("--checks", ",".join(CHECKS), "--max-examples", "5"),
            # Unloading the model would end what the others are about.
            *("--exclude-path-regex", "load", "--request-timeout", "60"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        try:
            output, _ = await process.communicate()
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        assert process.returncode == 0, output.decode()[-20_000:]
