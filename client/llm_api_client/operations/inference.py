"""Models and Triton servers, and the launches that start them."""

from typing import Any
from urllib.parse import quote

import msgspec

from llm_api_client.operations.paging import pages
from llm_api_client.schemas import Launch, Model, Server
from llm_api_client.steps import Call, Feed, Request, exchange, fetch

_LOAD_SECONDS = 600.0


def _in(collection: str, name: str, action: str = "") -> str:
    return f"/{collection}/{quote(name, safe='')}" + (f"/{action}" if action else "")


def list_models() -> Call[list[Model]]:
    """The models that the service serves, and those that it served before."""
    return (yield from fetch(Request("GET", "/models/"), list[Model]))


def get_model(name: str) -> Call[Model]:
    """Read one model's readiness, limits and load."""
    return (yield from fetch(Request("GET", _in("models", name)), Model))


def load_model(name: str) -> Call[None]:
    """Load a model of the repository on each Triton server; returns when it is loaded."""
    yield from exchange(Request("POST", _in("models", name, "load"), timeout=_LOAD_SECONDS))


def unload_model(name: str) -> Call[None]:
    """Unload a model; its queued results wait until it is loaded again."""
    yield from exchange(Request("POST", _in("models", name, "unload"), timeout=_LOAD_SECONDS))


def list_servers() -> Call[list[Server]]:
    """The Triton servers, with their health and models. Needs the scope `operate`, like all of these."""
    return (yield from fetch(Request("GET", "/servers"), list[Server]))


def get_server(name: str) -> Call[Server]:
    """Read one server's health and models."""
    return (yield from fetch(Request("GET", _in("servers", name)), Server))


def add_server(
    name: str, grpc: str, *, http: str | None = None, metrics: str | None = None,
    slots: int | None = None, secret: str | None = None,
) -> Call[Server]:  # fmt: skip
    """Register a Triton server.

    Args:
        name: letters, digits, `.`, `_` and `-`.
        grpc: its address, `host:port`; `http` and `metrics` likewise.
        http: address of its HTTP port.
        metrics: address of its metrics.
        slots: most results that each worker runs on it at a time.
        secret: that it was started with; no response returns it.
    """
    members = {
        "name": name,
        "grpc": grpc,
        "http": http,
        "metrics": metrics,
        "slots": slots,
        "secret": secret,
    }
    body = {member: value for member, value in members.items() if value is not None}
    return (yield from fetch(Request("POST", "/servers", json=body, is_repeatable=False), Server))


def drain_server(name: str) -> Call[Server]:
    """Send a server no new results; its running results continue."""
    return (yield from fetch(Request("POST", _in("servers", name, "drain")), Server))


def resume_server(name: str) -> Call[Server]:
    """Send results to a drained server again."""
    return (yield from fetch(Request("POST", _in("servers", name, "resume")), Server))


def remove_server(name: str) -> Call[None]:
    """Remove a server; its running results continue to their end."""
    yield from exchange(Request("DELETE", _in("servers", name)))


def create_launch(name: str, model: str, **options: Any) -> Call[Launch]:
    """Start a Triton server for a model, as a job of a cluster or a process. Needs `operate`.

    Args:
        name: of the launch and of its server.
        model: a Hugging Face id, or a path that the profile permits.
        options: further members of `POST /launches`, such as `profile` or `time_limit_minutes`.
    """
    body = {"name": name, "model": model, **options}
    return (yield from fetch(Request("POST", "/launches", json=body, is_repeatable=False), Launch))


def list_launches(*, state: str | None = None, limit: int | None = None) -> Feed[Launch]:
    """Iterate over the launches, newest first; `limit` None: all."""
    yield from pages("/launches", Launch, {"state": state}, limit)


def get_launch(launch_id: str) -> Call[Launch]:
    """Read one launch."""
    return (yield from fetch(Request("GET", _in("launches", launch_id)), Launch))


def launch_log(launch_id: str) -> Call[str]:
    """The end of the job's output."""
    reply = yield from exchange(Request("GET", _in("launches", launch_id, "log")))
    log: str = msgspec.json.decode(reply.body, type=dict[str, str])["log"]
    return log


def stop_launch(launch_id: str) -> Call[Launch]:
    """Drain a launch's server, then end its job."""
    return (yield from fetch(Request("POST", _in("launches", launch_id, "stop")), Launch))


def delete_launch(launch_id: str) -> Call[None]:
    """Delete a launch that has ended."""
    yield from exchange(Request("DELETE", _in("launches", launch_id)))


def launch_profiles() -> Call[list[dict[str, Any]]]:
    """The places where servers can be launched."""
    return (yield from fetch(Request("GET", "/launches/profiles"), list[dict[str, Any]]))
