"""Models and servers: names of models and words of servers are text, for all contents."""

from html.parser import HTMLParser
from typing import Any

from starlette.requests import Request

from app.ui.render import fragment

EVIL = "<img src=x onerror=alert(1)></td>\"'<script>alert(1)</script>"
MODEL: dict[str, Any] = {
    "name": EVIL, "version": 1, "ready": False, "reason": EVIL, "chat": True, "max_model_len": None,
    "adapters": [EVIL],
    "queued": 1, "running": 0, "tokens_per_second": 0.0, "done": 0, "spark": None, "slots": 0,
}  # fmt: skip
SERVER: dict[str, Any] = {
    "name": EVIL, "grpc": EVIL, "slots": 1, "state": "active", "registered": True, "healthy": False,
    "error": EVIL, "running": 0, "models": [{"name": EVIL, "ready": False, "engine_dead_since": None}],
}  # fmt: skip


class Parsed(HTMLParser):
    """A document as a browser parses it: elements, attributes and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.values: list[str | None] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.values += [value for _, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text += data


def rendered(*, is_operator: bool) -> Parsed:
    request = Request({"type": "http", "method": "GET", "path": "/models", "headers": []})
    models = [MODEL, MODEL | {"ready": True}]
    servers = [SERVER, SERVER | {"state": "draining"}] if is_operator else []
    context = {"tiles": [], "models": models, "servers": servers, "is_operator": is_operator}
    return Parsed(bytes(fragment(request, "_fleet.html", **context).body).decode())


def test_names_are_text() -> None:
    found = rendered(is_operator=True)
    assert not found.tags & {"script", "img"}
    assert not {name for name in found.attributes if name == "style" or name.startswith("on")}
    assert found.text.count(EVIL) >= 8  # names, reason, error, addresses, models of servers
    assert EVIL in found.values  # the name that a button sends


def test_others_than_operators_have_no_controls() -> None:
    found = rendered(is_operator=False)
    assert not found.tags & {"form", "button", "input"}
    assert "Servers" not in found.text
