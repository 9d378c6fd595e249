"""Traces of a request through API, queue, worker and Triton, by OpenTelemetry.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set; OpenTelemetry is not imported then. The context
(`traceparent`, https://www.w3.org/TR/trace-context/) is stored in the result's row, because another
process may run the result. The worker creates spans after their end, from the times it recorded.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

_SHUTDOWN_SECONDS = 5.0
_PATH = "/v1/traces"
_HEADER = "traceparent"
_MAX_CHARACTERS = 128  # the library logs each longer one

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    def __init__(self, endpoint: str, name: str) -> None:
        # Imported here because they cost memory and a tenth of a second.
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": name}
        # OTEL_TRACES_SAMPLER selects the sampler; the default is the parent's decision.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + _PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("app")
        self._kinds = trace.SpanKind
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._set_span = trace.set_span_in_context
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple["Span", str]:
        """Start a request's span, within the client's trace if it sent one; return it and its context."""
        given = [value.decode("latin-1") for key, value in headers if key == _HEADER.encode()]
        is_one = len(given) == 1 and len(given[0]) <= _MAX_CHARACTERS
        parent = self._context(given[0] if is_one else None)
        span = self._tracer.start_span(name, parent, self._kinds.SERVER)
        return span, self._traceparent(span)

    def end(self, span: "Span", attributes: Attributes, *, is_error: bool = False) -> None:
        for key, value in attributes.items():
            span.set_attribute(key, value)
        if is_error:
            span.set_status(self._error)
        span.end()

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Attributes,
        *,
        is_error: bool = False,
    ) -> None:
        """Record an ended span; `start` and `end` are Unix times in seconds."""
        began = int(start * 1e9)
        span = self._tracer.start_span(
            name, self._context(parent), self._kinds.INTERNAL, attributes, start_time=began
        )
        if is_error:
            span.set_status(self._error)
        span.end(max(began, int(end * 1e9)))

    @contextlib.contextmanager
    def calling(self, name: str, parent: str, attributes: Attributes) -> Iterator[str]:
        """Span of a call to another server; yields the context to send to it."""
        context = self._context(parent)
        span = self._tracer.start_span(name, context, self._kinds.CLIENT, attributes)
        try:
            yield self._traceparent(span)
        except BaseException as error:
            span.set_attribute("error.type", type(error).__name__)  # its message may quote a prompt
            span.set_status(self._error)
            raise
        finally:
            span.end()

    async def close(self) -> None:
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _SHUTDOWN_SECONDS)

    def _context(self, traceparent: str | None) -> "Context":
        from opentelemetry.context import Context

        carrier = {} if traceparent is None else {_HEADER: traceparent}
        return self._propagator.extract(carrier, Context())

    def _traceparent(self, span: "Span") -> str:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, self._set_span(span))
        return carrier.get(_HEADER, "")


# The tracing of this process; None: traces are off.
active: Tracing | None = None


@contextlib.asynccontextmanager
async def tracing(endpoint: str | None, name: str) -> AsyncIterator[None]:
    global active
    if endpoint is None:
        yield
        return
    active = Tracing(endpoint, name)
    try:
        yield
    finally:
        ending, active = active, None
        await ending.close()
