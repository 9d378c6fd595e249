"""Traces of a request through API, queue, worker and Triton, by OpenTelemetry.

Off unless OTEL_EXPORTER_OTLP_ENDPOINT is set; OpenTelemetry is not imported then. The context
(`traceparent`, https://www.w3.org/TR/trace-context/) is stored in the result's row, because another
process may run the result. The worker creates spans after their end, from the times it recorded.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from app import __version__

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"  # of the attributes' names
_SHUTDOWN_SECONDS = 5.0
_PATH = "/v1/traces"
_HEADER = "traceparent"
_MAX_CHARACTERS = 128  # the library logs each longer one
_ERROR_TYPE = "error.type"

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


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
        self._tracer: Tracer = self._provider.get_tracer("app", __version__, schema_url=SCHEMA)
        self._kinds = trace.SpanKind
        self._error = trace.Status(trace.StatusCode.ERROR)
        self._set_span = trace.set_span_in_context
        self._propagator = TraceContextTextMapPropagator()

    def begin(
        self, name: str, headers: Sequence[tuple[bytes, bytes]], attributes: Attributes
    ) -> tuple["Span", str]:
        """Start a request's span, within the client's trace if it sent one; return it and its context."""
        given = [value.decode("latin-1") for key, value in headers if key == _HEADER.encode()]
        is_one = len(given) == 1 and len(given[0]) <= _MAX_CHARACTERS
        parent = self._context(given[0] if is_one else None)
        span = self._tracer.start_span(name, parent, self._kinds.SERVER, attributes)
        return span, self._traceparent(span)

    def end(self, span: "Span", attributes: Attributes, name: str | None = None) -> None:
        """End a span; an attribute `error.type` makes it a failed one."""
        if name is not None:
            span.update_name(name)
        span.set_attributes(attributes)
        if _ERROR_TYPE in attributes:
            span.set_status(self._error)
        span.end()

    def record(
        self,
        name: str,
        parent: str,
        start: float,
        end: float,
        attributes: Attributes,
    ) -> None:
        """Record an ended span, as `end`; `start` and `end` are Unix times in seconds."""
        began = int(start * 1e9)
        span = self._tracer.start_span(
            name, self._context(parent), self._kinds.INTERNAL, attributes, start_time=began
        )
        if _ERROR_TYPE in attributes:
            span.set_status(self._error)
        span.end(max(began, int(end * 1e9)))

    @contextlib.contextmanager
    def calling(
        self, name: str, parent: str, attributes: Attributes, answer: Callable[[], Attributes]
    ) -> Iterator[str]:
        """Span of a call to another server; yields the context to send to it.

        `answer`: the attributes that are known at its end, not asked for if the span is not sampled. An
        exception has precedence over its `error.type`.
        """
        context = self._context(parent)
        span = self._tracer.start_span(name, context, self._kinds.CLIENT, attributes)
        failed: Attributes = {}
        try:
            yield self._traceparent(span)
        except BaseException as error:
            failed = {_ERROR_TYPE: type(error).__name__}  # its message may quote a prompt
            raise
        finally:
            self.end(span, {**(answer() if span.is_recording() else {}), **failed})

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
