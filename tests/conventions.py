"""Levels and types of attributes by OpenTelemetry's conventions, and spans and metrics held to them.

The tables are the model's: https://github.com/open-telemetry/semantic-conventions/tree/v1.41.0/model, in
gen-ai/spans.yaml, gen-ai/metrics.yaml, gen-ai/registry.yaml and http/spans.yaml. Later versions of it have no
conventions for generative AI; those of https://github.com/open-telemetry/semantic-conventions-genai are not released.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes

from tests.otlp import attributes

_COMMON = """
error.type                                 string    if_failed
gen_ai.operation.name                      string    required
gen_ai.provider.name                       string    required
gen_ai.request.model                       string    required
server.address                             string    recommended
server.port                                int       if_address
"""
# Required if available: the worker knows no conversation, and requests one choice.
_INFERENCE = (
    _COMMON
    + """
gen_ai.conversation.id                     string    unavailable
gen_ai.input.messages                      any       opt_in
gen_ai.output.messages                     any       opt_in
gen_ai.output.type                         string    if_requested
gen_ai.request.choice.count                int       unavailable
gen_ai.request.frequency_penalty           double    recommended
gen_ai.request.max_tokens                  int       recommended
gen_ai.request.presence_penalty            double    recommended
gen_ai.request.seed                        int       if_requested
gen_ai.request.stop_sequences              string[]  recommended
gen_ai.request.stream                      boolean   required
gen_ai.request.temperature                 double    recommended
gen_ai.request.top_k                       double    recommended
gen_ai.request.top_p                       double    recommended
gen_ai.response.finish_reasons             string[]  recommended
gen_ai.response.id                         string    recommended
gen_ai.response.model                      string    recommended
gen_ai.response.time_to_first_chunk        double    recommended
gen_ai.system_instructions                 any       opt_in
gen_ai.tool.definitions                    any       opt_in
gen_ai.usage.cache_creation.input_tokens   int       recommended
gen_ai.usage.cache_read.input_tokens       int       recommended
gen_ai.usage.input_tokens                  int       recommended
gen_ai.usage.output_tokens                 int       recommended
gen_ai.usage.reasoning.output_tokens       int       recommended
"""
)
_EMBEDDINGS = (
    _COMMON
    + """
gen_ai.embeddings.dimension.count          int       recommended
gen_ai.request.encoding_formats            string[]  recommended
gen_ai.response.model                      string    recommended
gen_ai.usage.input_tokens                  int       recommended
"""
)
_HTTP = """
client.address                             string    recommended
error.type                                 string    if_failed
http.request.method                        string    required
http.request.method_original               string    if_requested
http.response.status_code                  int       required
http.route                                 string    if_requested
network.peer.address                       string    recommended
network.protocol.version                   string    recommended
server.address                             string    recommended
server.port                                int       if_address
url.path                                   string    required
url.query                                  string    if_requested
url.scheme                                 string    required
user_agent.original                        string    recommended
"""
_METRIC = """
gen_ai.operation.name                      string    required
gen_ai.provider.name                       string    required
gen_ai.request.model                       string    required
gen_ai.response.model                      string    recommended
server.address                             string    recommended
server.port                                int       if_address
"""

_SECONDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
# By name: the unit, the attributes beside those of all, and the boundaries that docs/gen-ai/gen-ai-metrics.md lists.
METRICS: dict[str, tuple[str, tuple[str, ...], tuple[float, ...]]] = {
    "gen_ai.server.request.duration": ("s", ("error.type",), _SECONDS),
    "gen_ai.server.time_to_first_token": (
        *("s", ()),
        (
            *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
            *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
        ),
    ),
    "gen_ai.server.time_per_output_token": (
        *("s", ()),
        (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
    ),
    "gen_ai.client.token.usage": (
        *("{token}", ("gen_ai.token.type",)),
        (
            *(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304),
            *(16777216, 67108864),
        ),
    ),
}
_TYPES = {
    "string": "string_value",
    "int": "int_value",
    "double": "double_value",
    "boolean": "bool_value",
    "string[]": "array_value",
}

NAMES = {value for key, value in vars(gen_ai_attributes).items() if key.startswith("GEN_AI_")}
OPERATIONS = {one.value for one in gen_ai_attributes.GenAiOperationNameValues} | {"score"}
_METHODS = {one.value for one in http_attributes.HttpRequestMethodValues}


def _table(text: str) -> dict[str, tuple[str, str]]:
    rows = (line.split() for line in text.strip().splitlines() if line)
    return {name: (kind, level) for name, kind, level in rows}


INFERENCE, EMBEDDINGS, HTTP, METRIC = map(_table, (_INFERENCE, _EMBEDDINGS, _HTTP, _METRIC))


def check_model_span(span: Span, **requested: Any) -> dict[str, Any]:
    """The span is a whole one of a call of a model; its attributes. `requested`: those of its request."""
    found = attributes(span)
    operation = found["gen_ai.operation.name"]
    is_generation = operation in ("chat", "text_completion")
    assert operation in OPERATIONS
    assert span.name == f"{operation} {found['gen_ai.request.model']}"
    assert span.kind == Span.SPAN_KIND_CLIENT
    _check(span, INFERENCE if is_generation else EMBEDDINGS, requested)
    return found


def check_request_span(span: Span, **requested: Any) -> dict[str, Any]:
    """The span is a whole one of an HTTP server."""
    found = attributes(span)
    method = found["http.request.method"]
    assert method in _METHODS
    shown = "HTTP" if method == "_OTHER" else method
    assert span.name == " ".join(filter(None, (shown, found.get("http.route"))))
    assert span.kind == Span.SPAN_KIND_SERVER
    _check(span, HTTP, requested)
    return found


def check_own_span(span: Span) -> dict[str, Any]:
    """The span is none of the conventions', so that no tool counts it as a call of a model."""
    found = attributes(span)
    assert span.kind == Span.SPAN_KIND_INTERNAL
    assert all(key.startswith("llm.") or key == "error.type" for key in found), found
    return found


def _check(span: Span, table: Mapping[str, tuple[str, str]], requested: Mapping[str, Any]) -> None:
    """`requested`: the attributes that only some requests have, by names with `__` for dots."""
    found = attributes(span)
    wanted = {name.replace("__", "."): value for name, value in requested.items()}
    needed = {
        "required": True,
        "if_failed": span.status.code == span.status.STATUS_CODE_ERROR,
        "if_address": "server.address" in found,
    }
    for name, (_, level) in table.items():
        if level in needed:
            assert (name in found) == needed[level], (span.name, name)
        elif level == "if_requested":
            assert (name in found) == (name in wanted), (span.name, name)
        elif level in ("opt_in", "unavailable"):
            assert name not in found, (span.name, name)
    assert {name: found.get(name) for name in wanted} == wanted
    for one in span.attributes:
        if one.key.startswith("llm."):
            continue
        assert one.key in table, (span.name, one.key)
        assert one.key in NAMES or not one.key.startswith("gen_ai."), one.key
        kind = _TYPES[table[one.key][0]]
        assert one.value.WhichOneof("value") == kind, (span.name, one)
        if kind == "array_value":
            values = one.value.array_value.values
            assert {value.WhichOneof("value") for value in values} == {"string_value"}, one
    assert not span.status.message
    assert not span.events


def prometheus_name(name: str, unit: str) -> str:
    """https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/"""
    return name.replace(".", "_") + {"s": "_seconds", "{token}": ""}[unit]
