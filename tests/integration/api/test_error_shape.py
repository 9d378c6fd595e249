"""Every route of the document answers its refusals in the shape of its dialect."""

import re

import pytest

from tests.conftest import Service
from tests.integration.support import UNKNOWN_ID, assert_refusal

SILENT = {"/health", "/health/live", "/ping"}  # take nothing, refuse nothing


@pytest.mark.trial
async def test_every_route_refuses_in_its_dialects_shape(api: Service) -> None:
    document = (await api.client.get("/openapi.json")).json()
    refused: dict[str, set[int]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            statuses = refused.setdefault(f"{method} {path}", set())
            unknown = re.sub(r"{\w+}", UNKNOWN_ID, path).replace("send/" + UNKNOWN_ID, "send/x")
            queries = [p["name"] for p in operation.get("parameters", []) if p["in"] == "query"]
            attempts: list[tuple[str, bytes | None]] = [
                (unknown, None),
                (re.sub(r"{\w+}", "%00", path), None),
                *((f"{unknown}?{name}=%00", None) for name in queries if name != "partial"),
            ]
            if "requestBody" in operation:
                attempts += [(unknown, body) for body in (b"{", b"1", b'{"nothing": 1}')]
            for url, body in attempts:
                headers = {"content-type": "application/json"} if body is not None else None
                answer = await api.client.request(method, url, content=body, headers=headers)
                assert answer.status_code < 500, (method, url, answer.text)
                if answer.status_code >= 400:
                    assert_refusal(url, answer, answer.status_code)
                    statuses.add(answer.status_code)
            wrong = await api.client.request("TRACE", unknown)
            assert_refusal(unknown, wrong, 405, "method_not_allowed")
            foreign = await api.client.request(method, unknown, headers={"host": "evil.example"})
            assert_refusal(unknown, foreign, 403, "forbidden_origin")
    takes_nothing = {
        *("/models/", "/health/ready", "/webhooks/secret", "/v1/models", "/servers", "/me"),
        *("/launches/catalogue", "/launches/engine-options", "/launches/profiles", "/metrics"),
    }
    silent = {key for key, found in refused.items() if not found}
    assert {key.split()[1] for key in silent} == SILENT | takes_nothing | {"/"}  # GET /
