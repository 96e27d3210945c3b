"""OpenTelemetry traces: one for each request, with a span for each phase and each worker that had it.

The library is optional, and imported only when traces are enabled.
"""

import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from streamserve.fleet.tracing.recorder import TraceSpan

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

TELEMETRY_MISSING = 'OpenTelemetry is not installed: pip install "streamserve[otel]"'


def telemetry_installed() -> bool:
    """Return whether the OpenTelemetry exporter is installed."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http.trace_exporter") is not None
    except ModuleNotFoundError:
        return False


def exporting(endpoint: str) -> "SpanProcessor":
    """Return a processor that sends spans to an OTLP collector over HTTP, in batches, in the background."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))


class Telemetry:
    """Collects a request's spans until the request has ended, then passes them to `processor` as one trace.
    Steps belong to many requests and are left out."""

    def __init__(self, processor: "SpanProcessor") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        self._provider = TracerProvider(resource=Resource.create({"service.name": "streamserve"}))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("streamserve")
        self._epoch = time.time() - time.monotonic()
        self._parts: dict[str, list[TraceSpan]] = {}

    @property
    def pending(self) -> int:
        """The number of requests whose spans wait for the request's end."""
        return len(self._parts)

    def add(self, span: TraceSpan) -> None:
        """Add a span. The span named `request` completes its trace; later spans are left out."""
        if span.late or not span.request:
            return
        if span.name != "request":
            self._parts.setdefault(span.request, []).append(span)
            return
        from opentelemetry.trace import set_span_in_context

        root = self._begin(span, None)
        context = set_span_in_context(root)
        for part in self._parts.pop(span.request, []):
            child = self._begin(part, context)
            for name, at in part.events:
                child.add_event(name, timestamp=self._nanos(at))
            child.end(self._nanos(part.end))
        root.end(self._nanos(span.end))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()

    def _begin(self, span: TraceSpan, context: Any) -> Any:
        attributes = {"request": span.request, "process": span.process}
        return self._tracer.start_span(
            span.name, context, attributes=attributes, start_time=self._nanos(span.start)
        )

    def _nanos(self, at: float) -> int:
        """Return a time of the shared clock in nanoseconds since 1970."""
        return int(1e9 * (at + self._epoch))
