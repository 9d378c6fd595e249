"""Triton at the tunnels' ends, which are HOST:PORT: its health, its models."""

import http.client
import json

from nvidia_triton.vast import clean

ANSWER_SECONDS = 10


class ServerError(Exception):
    """Nothing useful answers: one line."""


def is_ready(address: str) -> bool:
    """True when the server and all its models are ready."""
    try:
        status, _ = _ask(address, "GET", "/v2/health/ready")
    except ServerError:
        return False
    return status == 200


def statistics(address: str) -> str:
    """Triton's statistics of its models, as readable JSON; raises ServerError."""
    return json.dumps(_json(address, "GET", "/v2/models/stats"), indent=2)


def failures(address: str) -> list[str]:
    """The models that Triton could not load, each with its reason; raises ServerError."""
    index = _json(address, "POST", "/v2/repository/index")
    if not isinstance(index, list):
        raise ServerError("Triton's index of models is no list.")
    return [
        f"{clean(str(entry.get('name')))}: {clean(str(entry['reason']))}"
        for entry in index
        if isinstance(entry, dict)
        and entry.get("state") == "UNAVAILABLE"
        and entry.get("reason") not in (None, "", "unloaded")
    ]


def _json(address: str, method: str, path: str) -> object:
    status, body = _ask(address, method, path)
    if status != 200:
        raise ServerError(f"Triton answers {path} with status {status}.")
    try:
        return json.loads(body)
    except ValueError as error:
        raise ServerError(f"Triton's answer to {path} is not JSON.") from error


def _ask(address: str, method: str, path: str) -> tuple[int, bytes]:
    # Not urllib: it would ask the proxy of the environment.
    connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(
            f"No Triton answers at {address}: make ssh-tunnels-tritonserver CONTRACT_ID=..."
        ) from error
    finally:
        connection.close()
