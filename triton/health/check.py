"""Health check of a Triton server: one generated token per ready model.

Triton keeps a model READY after its engine or its Python stub has died, so readiness is not health.
An error is illness, a refusal of the request is not. A late answer is illness only if the model
generated nothing meanwhile: a full engine answers late.

Protocols: Triton's HTTP generate, statistics and repository extensions
(https://github.com/triton-inference-server/server/tree/main/docs/protocol), its metrics port.
"""

from __future__ import annotations

import http.client
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from access import KEY

PROBE = {
    "text_input": "a",
    "stream": False,
    # Inputs that a model lacks become parameters of the request, which backends ignore.
    "sampling_parameters": json.dumps({"max_tokens": 1, "temperature": 0}),
}
# The first pattern is the name of a status code, put before the message by this repository's backends.
REFUSALS = re.compile(
    r"^INVALID_ARG|does not support '\w+' request|Input prompt|prompt is too long"
)
_TOKENS = re.compile(r'^(vllm:\w+_total)\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)', re.MULTILINE)
_RUNNING = re.compile(
    r"^(?:vllm:num_requests_\w+|nv_inference_pending_request_count)"
    r'\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)',
    re.MULTILINE,
)
_FAILURES = re.compile(
    r'^nv_inference_request_failure\{[^}]*\bmodel="([^"]*)"[^}]*\} (\S+)', re.MULTILINE
)
_AT_ONCE = 8  # models that are probed side by side
_LONGEST_ANSWER = 16 * 1024 * 1024  # bytes
_LONGEST_REASON = 300  # characters
_METRICS_SECONDS = 5.0


class SilentError(Exception):
    """The server does not answer, or not within its time."""


class AnswerError(Exception):
    """The server answered with something that is not Triton's protocol."""


@dataclass
class Report:
    """Result of one check. `ready`: ready models that take text; `is_ill`: one of them failed."""

    ready: int = 0
    is_ill: bool = False
    problems: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """All problems in one line; empty if the server is healthy."""
        return "; ".join(self.problems)


class Server:
    """Addresses (`host:port`) of one server, and the seconds that a probe may take."""

    def __init__(
        self, http_address: str, metrics_address: str, seconds: float, secret: str = ""
    ) -> None:
        """`secret`: see access.py."""
        self.http, self.metrics, self.seconds = http_address, metrics_address, seconds
        self._headers = {"Content-Type": "application/json"}
        if secret:
            self._headers[KEY] = secret

    def ask(self, method: str, path: str, body: object = None) -> Any:
        """Send one request to the HTTP port; the decoded JSON."""
        content = _exchange(self.http, self.seconds, method, path, self._headers, body)
        try:
            return json.loads(content)
        except ValueError as error:
            text = " ".join(content[:80].decode(errors="replace").split())
            raise AnswerError(f"{self.http} is not Triton's HTTP port ({text!r})") from error

    def ready_models(self) -> list[str]:
        """Names of the ready models that have the input `text_input`."""
        index = self.ask("POST", "/v2/repository/index", {"ready": True})
        if not isinstance(index, list):
            raise AnswerError(f"{self.http} returned no repository index ({index!r:.80})")
        names = {entry["name"] for entry in index if entry.get("state") == "READY"}
        return sorted(name for name in names if self._takes_text(name))

    def _takes_text(self, model: str) -> bool:
        inputs = self.ask("GET", f"/v2/models/{quote(model, safe='')}").get("inputs", ())
        return any(tensor["name"] == "text_input" for tensor in inputs)

    def progress(self, model: str) -> dict[str, float]:
        """Counters that grow while the model works.

        vLLM's token counters where the backend reports them, as Triton counts each error of a
        decoupled model as a success; else the number of finished requests.
        """
        text = self._metrics()
        tokens = {name: float(value) for name, of, value in _TOKENS.findall(text) if of == model}
        if tokens:
            return tokens
        return {version: counts[0] for version, counts in self._requests(model).items()}

    def use(self, model: str) -> object:
        """A value that stays equal while the model is unused; None while requests run."""
        metrics = self._metrics()
        if any(float(value) for of, value in _RUNNING.findall(metrics) if of == model):
            return None
        # A request that killed its stub is counted here alone.
        failures = [value for of, value in _FAILURES.findall(metrics) if of == model]
        return self._requests(model), failures

    def _metrics(self) -> str:
        try:
            return _exchange(self.metrics, _METRICS_SECONDS, "GET", "/metrics", {}).decode()
        except SilentError:  # metrics are switched off
            return ""

    def _requests(self, model: str) -> dict[str, tuple[int, int]]:
        """Succeeded and failed requests, by version."""
        answer = self.ask("GET", f"/v2/models/{quote(model, safe='')}/stats")
        found = {}
        for entry in answer.get("model_stats", ()):
            counts = entry["inference_stats"]
            found[entry["version"]] = (counts["success"]["count"], counts["fail"]["count"])
        return found

    def probe(self, model: str) -> str:
        """Generate one token; the reason if the model is ill, else an empty text."""
        before = self.progress(model)
        try:
            answer = self.ask("POST", f"/v2/models/{quote(model, safe='')}/generate", PROBE)
        except SilentError:
            if self.progress(model) != before:
                return ""
            return f"no token within {self.seconds:g} s, and no progress of other requests"
        # Errors of decoupled models come with any status, 200 among them.
        error = str(answer.get("error", "")) if isinstance(answer, dict) else "not a JSON object"
        return "" if REFUSALS.search(error) else " ".join(error.split())[:_LONGEST_REASON]


def check(server: Server, min_ready: int, seen: dict[str, object] | None = None) -> Report:
    """Probe every ready model. Fewer than `min_ready` ready models are a problem, too.

    `seen`: the use of each model after its last probe. A model without use since then is not probed,
    as the probe would count as a request.
    """
    report = Report()

    def probe(model: str) -> str:
        try:
            reason = server.probe(model) if seen is None else _probe_used(server, model, seen)
        except (SilentError, AnswerError) as error:
            reason = str(error)
        return f"model {model}: {reason}" if reason else ""

    try:
        models = server.ready_models()
    except (SilentError, AnswerError) as error:
        report.problems.append(str(error))
        return report
    report.ready = len(models)
    if len(models) < min_ready:
        report.problems.append(f"{len(models)} models are ready, {min_ready} are required")
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        failures = list(filter(None, pool.map(probe, models)))
    report.is_ill = bool(failures)
    report.problems += failures
    return report


def _probe_used(server: Server, model: str, seen: dict[str, object]) -> str:
    use = server.use(model)
    if use is not None and seen.get(model) == use:
        return ""
    seen.pop(model, None)
    reason = server.probe(model)
    if not reason:
        seen[model] = server.use(model)
    return reason


def _exchange(
    address: str,
    seconds: float,
    method: str,
    path: str,
    headers: dict[str, str],
    body: object = None,
) -> bytes:
    """One HTTP exchange; proxies of the environment do not apply."""
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=seconds)
    try:
        payload = None if body is None else json.dumps(body)
        connection.request(method, path, payload, headers)
        return connection.getresponse().read(_LONGEST_ANSWER)
    except TimeoutError as error:
        raise SilentError(f"{address} did not answer within {seconds:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise SilentError(f"{address} does not answer ({error!r:.100})") from error
    finally:
        connection.close()
