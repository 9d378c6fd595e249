"""Traces: what happened to one request, from the API over the queue to the worker and Triton.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set; then OpenTelemetry is not even imported. The context
(https://www.w3.org/TR/trace-context/, `traceparent`) travels in the result's row, because
whoever takes the result may be another process, or the third to try. Spans are made when they are over:
the worker knows only then what it saw.
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
_MOST_CHARACTERS = 128  # a longer one is logged by the library, each time

Attributes = Mapping[str, str | int | float | bool]


class Tracing:
    """Makes the spans of one process, and sends them in the background."""

    def __init__(self, endpoint: str, name: str) -> None:
        # Here, not above: they take memory and a tenth of a second.
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": name}
        # The sampler is what OTEL_TRACES_SAMPLER says, by default the decision of who began.
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        exporter = OTLPSpanExporter(endpoint=endpoint.rstrip("/") + _PATH)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer: Tracer = self._provider.get_tracer("app")
        self._kinds = trace.SpanKind
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._set_span = trace.set_span_in_context
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, name: str, headers: Sequence[tuple[bytes, bytes]]) -> tuple["Span", str]:
        """A request's span, as a part of its client's trace if that is told; and its context."""
        given = [value.decode("latin-1") for key, value in headers if key == _HEADER.encode()]
        is_one = len(given) == 1 and len(given[0]) <= _MOST_CHARACTERS
        parent = self._context(given[0] if is_one else None)
        span = self._tracer.start_span(name, parent, self._kinds.SERVER)
        return span, self._traceparent(span)

    def end(self, span: "Span", attributes: Attributes, *, is_error: bool = False) -> None:
        """End a span now."""
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
        """A span that is over; `start` and `end` in seconds since 1970."""
        began = int(start * 1e9)
        span = self._tracer.start_span(
            name,
            self._context(parent),
            self._kinds.INTERNAL,
            attributes,
            start_time=began,
        )
        if is_error:
            span.set_status(self._error)
        span.end(max(began, int(end * 1e9)))

    @contextlib.contextmanager
    def calling(self, name: str, parent: str, attributes: Attributes) -> Iterator[str]:
        """A span around a call of another server, which is told the context that is yielded."""
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
        """Send what there is, for a time: a collector that is away does not hold up the end."""
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


# Of this process; None: traces are off.
active: Tracing | None = None


@contextlib.asynccontextmanager
async def tracing(endpoint: str | None, name: str) -> AsyncIterator[None]:
    """Trace what happens inside, if there is somewhere to send it."""
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
