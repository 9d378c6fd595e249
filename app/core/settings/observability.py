"""Log, metrics and traces."""

from typing import Annotated, Literal

from pydantic import Field

from app.core.settings.fields import Optional, Section


class LogSettings(Section, title="Log"):
    format: Literal["text", "json"] = Field("text", alias="LLM_LOG_FORMAT")
    """`text`: lines for people. `json`: one object per line, with the ids of request, result,
    worker, attempt and team as members."""
    level: Literal["debug", "info", "warning", "error"] = Field("info", alias="LLM_LOG_LEVEL")
    """Lowest level that is logged. `debug` logs each request and result, without their texts."""
    content: bool = Field(False, alias="LLM_LOG_CONTENT")
    """Also log the prompt and text of each result (10,000 characters of each) and what errors quote
    of them. For development: the log then contains your users' texts."""


class ObservabilitySettings(Section, title="Observability"):
    metrics_port: Optional[Annotated[int, Field(ge=1, le=65535)]] = None
    """Port on which this process serves `GET /metrics` and `/health/ready` without a token; one per
    process of a host. Unset: none. The API also serves `/metrics` on its own port, for tokens with
    the scope `operate`."""
    metrics_host: str = "127.0.0.1"
    """Address of that port. Metrics show the usage of each team: bind another address only where a
    network policy restricts access."""
    otlp_endpoint: Optional[Annotated[str, Field(pattern=r"^https?://")]] = Field(
        None, alias="OTEL_EXPORTER_OTLP_ENDPOINT"
    )
    """Collector that receives traces by OTLP over HTTP (`http://127.0.0.1:4318`). OpenTelemetry's
    other variables apply as well: `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_TRACES_SAMPLER`,
    `OTEL_SERVICE_NAME`. Unset: no traces."""
