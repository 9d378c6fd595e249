"""The scope that a request needs: the table of paths."""

import pytest

from app.api.middleware.access import OPEN_PATHS, needed_scope

RESULT = "01890000-0000-7000-8000-000000000000"


@pytest.mark.parametrize("path", [*sorted(OPEN_PATHS), "/static-offline-docs/swagger-ui.css"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_open_paths_are_open_to_readers_only(method: str, path: str) -> None:
    assert needed_scope(method, path, b"") is None
    for other in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert needed_scope(other, path, b"") == "use"


@pytest.mark.parametrize(
    "path",
    ["", "/results/", "/contexts/", "/models/", "/models/x", "/webhooks/secret", "/nothing",
     "/health/", "/health/ready/", "/Health", "//health", "/health/../results/", "/docs/x",
     "/openapi.json/", "/static-offline-docs", "/v1/models", "/health%2f", "health"],
)  # fmt: skip
def test_everything_else_needs_a_token(path: str) -> None:
    assert needed_scope("GET", path, b"") == "use"


@pytest.mark.parametrize("path", ["/models/x/load", "/models/x/unload", "/metrics", "/system"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_operators_paths(method: str, path: str) -> None:
    assert needed_scope(method, path, b"") == "operate"


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/launches"), ("DELETE", f"/launches/{RESULT}"), ("GET", f"/launches/{RESULT}/log"),
     ("POST", f"/launches/{RESULT}/stop"), ("PUT", "/launches/catalogue"), ("GET", "/launches/"),
     ("POST", "/launches/downloads"), ("POST", f"/launches/downloads/{RESULT}/cancel")],
)  # fmt: skip
def test_launching_is_an_operators(method: str, path: str) -> None:
    assert needed_scope(method, path, b"") == "operate"


@pytest.mark.parametrize(
    "path",
    [
        "/launches",
        "/launches/catalogue",
        "/launches/profiles",
        f"/launches/{RESULT}",
        "/launches/downloads",
        f"/launches/downloads/{RESULT}",
    ],
)
def test_what_is_launched_is_read_by_all(path: str) -> None:
    assert needed_scope("GET", path, b"") == needed_scope("HEAD", path, b"") == "use"


def test_planning_is_for_all() -> None:
    assert needed_scope("POST", "/launches/plan", b"") == "use"
    assert needed_scope("DELETE", "/launches/plan", b"") == "operate"


@pytest.mark.parametrize(
    ("method", "path", "query", "needed"),
    [
        ("GET", f"/results/{RESULT}/stream", b"ticket=x", None),
        ("GET", f"/results/{RESULT}/stream", b"after=1:2&ticket=x", None),
        ("GET", f"/results/{RESULT}/stream", b"%74icket=x", "use"),
        ("GET", f"/results/{RESULT}/stream", b"", "use"),
        ("GET", f"/results/{RESULT}/stream", b"ticket=", "use"),
        ("GET", f"/results/{RESULT}/stream", b"tickets=x", "use"),
        ("GET", f"/results/{RESULT}/stream", b"after=ticket", "use"),
        ("GET", f"/results/{RESULT}", b"ticket=x", "use"),
        ("GET", f"/results/{RESULT}/stream/", b"ticket=x", "use"),
        ("GET", "/results/a/b/stream", b"ticket=x", "use"),
        ("POST", f"/results/{RESULT}/stream", b"ticket=x", "use"),
        ("POST", f"/results/{RESULT}/stream-ticket", b"ticket=x", "use"),
    ],
)
def test_a_ticket_opens_a_stream_and_nothing_else(
    method: str, path: str, query: bytes, needed: str | None
) -> None:
    assert needed_scope(method, path, query) == needed
