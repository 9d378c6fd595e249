"""Every route of the document answers its refusals in one shape."""

import re

import httpx

from tests.conftest import Service
from tests.integration.support import UNKNOWN_ID, assert_openai_error, assert_problem

SILENT = {"/health", "/health/live"}  # take nothing, refuse nothing


def assert_refusal(path: str, answer: httpx.Response, code: str | None = None) -> None:
    """In the shape of the path's dialect."""
    if path.startswith("/v1/"):
        assert_openai_error(answer, answer.status_code, code)
    else:
        assert_problem(answer, answer.status_code, code or answer.json()["code"])


async def test_every_route_refuses_in_one_shape(api: Service) -> None:
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
                    assert_refusal(path, answer)
                    statuses.add(answer.status_code)
            wrong = await api.client.request("TRACE", unknown)
            assert wrong.status_code == 405
            assert_refusal(path, wrong, "method_not_allowed")
            foreign = await api.client.request(method, unknown, headers={"host": "evil.example"})
            assert foreign.status_code == 403
            assert_refusal(path, foreign, "forbidden_origin")
    takes_nothing = {"/models/", "/health/ready", "/webhooks/secret", "/v1/models"}
    silent = {key for key, found in refused.items() if not found}
    assert {key.split()[1] for key in silent} == SILENT | takes_nothing
