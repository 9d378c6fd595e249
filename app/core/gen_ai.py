"""OpenTelemetry's conventions for generative AI: names of operations, and metrics of ended results.

Version 1.41 of https://opentelemetry.io/docs/specs/semconv/gen-ai/, the last one before its move to
https://github.com/open-telemetry/semantic-conventions-genai. The metrics have the conventions' buckets, and the
names that https://opentelemetry.io/docs/specs/otel/compatibility/prometheus_and_openmetrics/ makes of theirs.
The conventions count tokens for clients alone, so that metric is one of theirs.
"""

from collections.abc import Sequence

from app.core.metrics import Histogram, Series

# The conventions list vendors and no server of one's own: theirs have this form, as `aws.bedrock`.
PROVIDER = "nvidia.triton"

_SECONDS = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10,
)  # fmt: skip
_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_TOKENS = tuple(4**power for power in range(14))

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


def _histogram(name: str, text: str, buckets: Sequence[float], *labels: str) -> Series[Histogram]:
    return Series(name, text, lambda: Histogram(buckets), (*_LABELS, *labels))


REQUEST_DURATION = _histogram(
    "gen_ai_server_request_duration_seconds",
    "From acceptance to the end of a result; `error_type` is empty for completed ones.",
    _SECONDS,
    "error_type",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "gen_ai_server_time_to_first_token_seconds",
    "From acceptance to the first text of a completed result.",
    _FIRST_TOKEN_SECONDS,
)
TIME_PER_OUTPUT_TOKEN = _histogram(
    "gen_ai_server_time_per_output_token_seconds",
    "Mean time from one token to the next of a completed result, after its first.",
    _TOKEN_SECONDS,
)
TOKEN_USAGE = _histogram(
    "gen_ai_client_token_usage",
    "Tokens of a result: `input` of its prompt, `output` generated.",
    _TOKENS,
    "gen_ai_token_type",
)


def operation_of(kind: str, *, is_chat: bool) -> str | None:
    """Return the conventions' name of what a result of this kind asks of a model; None: no model runs.

    They name no scores: that one is ours.
    """
    if kind == "generation":
        return "chat" if is_chat else "text_completion"
    return {"embedding": "embeddings", "score": "score"}.get(kind)
