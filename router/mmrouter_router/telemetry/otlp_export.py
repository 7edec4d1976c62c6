"""Spans by OpenTelemetry's SDK, sent to a collector by OTLP over HTTP; the SDK's environment variables apply.

A thread exports spans from a bounded queue, so that no request waits for the collector. Spans that find it full, or
that the collector does not accept, are lost and counted.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import mmrouter_lib as mmrouter
from mmrouter_router.telemetry.tracing import Headers, Span, Tracing, Value, failure_of, trace_context

log = logging.getLogger("mmrouter.tracing")

QUEUE = 2048  # maximum of queued spans, about 2 KiB each
BATCH = 128  # spans per export. Encoding takes 20 to 30 µs each in Python, during which the event loop stalls.
EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

Count = Callable[[str, int], None]  # counts spans by result: ``exported``, ``failed`` or ``queue_full``


class SpanQueue(BatchSpanProcessor):
    """Hands ended spans to an exporting thread, at most ``queue`` at a time."""

    def __init__(self, exporter: SpanExporter, count: Count, queue: int) -> None:
        self._exporter, self._count, self._limit = CountingExporter(exporter, count), count, queue
        super().__init__(self._exporter, max_queue_size=queue, max_export_batch_size=min(BATCH, queue))
        self._queued = 0
        self._closed = False

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or count it as lost. Called by the event loop only."""
        # The SDK's own queue would drop the oldest spans and only log it.
        if self._closed or self._queued - self._exporter.processed >= self._limit:
            self._count("queue_full", 1)
            return
        self._queued += 1
        super().on_end(span)

    def shutdown(self) -> None:
        """Export the queue; blocks while the collector does."""
        self._closed = True
        super().shutdown()  # type: ignore[no-untyped-call]


class CountingExporter(SpanExporter):
    """Wraps an exporter: counts spans by result, and logs when exports begin to fail or to succeed again."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter, self._count = exporter, count
        self.processed = 0  # spans that have left the queue
        self._lost = 0
        self._errors = LastErrorFilter()
        # Before the filter of an exporter that is still closing, which would hide the messages of this one.
        logging.getLogger(EXPORTER_LOG).filters.insert(0, self._errors)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans within the exporter's own time limit. Called by the exporting thread only."""
        began = time.monotonic()
        result = self._exporter.export(spans)
        self.processed += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._count("exported", len(spans))
            if self._lost:
                log.info("spans are exported again; %d were lost", self._lost)
            self._lost = 0
        else:
            self._count("failed", len(spans))
            if not self._lost:
                seconds = time.monotonic() - began
                log.warning("spans are lost, export failed after %.1f s: %s", seconds, self._errors.last or "no reason")
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """Shut the exporter down, even in the middle of an export."""
        self._exporter.shutdown()
        logging.getLogger(EXPORTER_LOG).removeFilter(self._errors)


class LastErrorFilter(logging.Filter):
    """Keeps the exporter's message per failed batch out of the log, and remembers the latest."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False


CLOSE_SECONDS = 2.0  # how long the process waits for the collector at its end
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_PROPAGATOR = TraceContextTextMapPropagator()
_NO_CONTEXT = Context()


def traces_url(endpoint: str, env: Mapping[str, str]) -> str | None:
    """Return the URL for spans; ``None`` where the environment sets it, which the exporter reads itself."""
    if any(env.get(name) for name in ENDPOINTS):
        return None
    return f"{endpoint.rstrip('/')}/v1/traces"


def resource(env: Mapping[str, str]) -> Resource:
    """Return the resource of the spans; ``OTEL_RESOURCE_ATTRIBUTES`` adds the pod."""
    service = {} if env.get("OTEL_SERVICE_NAME") else {"service.name": "mmrouter"}
    return Resource.create({"service.version": mmrouter.__version__, **service})


class OtlpTracing(Tracing):
    """The spans of one router, sent by an exporter."""

    def __init__(self, exporter: SpanExporter, about: Resource, count: Count, *, queue: int = QUEUE) -> None:
        self.queue = SpanQueue(exporter, count, queue)
        provider = TracerProvider(resource=about, shutdown_on_exit=False)
        provider.add_span_processor(self.queue)
        self._tracer = provider.get_tracer("mmrouter", mmrouter.__version__)

    @classmethod
    def to(cls, endpoint: str, env: Mapping[str, str], count: Count) -> "OtlpTracing":
        """Export to a collector at a base URL, ``http://HOST:4318``."""
        return cls(OTLPSpanExporter(endpoint=traces_url(endpoint, env)), resource(env), count)

    def request(self, method: str, path: str, headers: Headers) -> Span:
        context = _PROPAGATOR.extract(trace_context(headers), context=_NO_CONTEXT)
        span = self._tracer.start_span(f"{method} {path}", context=context, kind=SpanKind.SERVER)
        if not span.is_recording():
            return UnsampledSpan(span)
        span.set_attributes({"http.request.method": method, "http.route": path})
        return RecordedSpan(self._tracer, span)

    def close(self) -> None:
        # In a thread, because the SDK waits half a minute for a collector that hangs.
        closing = threading.Thread(target=self.queue.shutdown, name="tracing close", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("the collector did not accept the last spans within %g s", CLOSE_SECONDS)


class UnsampledSpan(Span):
    """A request that the sampler dropped: only its context is propagated, so that all processes drop it."""

    __slots__ = ("_headers",)

    def __init__(self, span: OtelSpan) -> None:
        self._headers = _headers(span)

    def propagate(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        return self._headers


class RecordedSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_ended", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: OtelSpan) -> None:
        self._tracer, self._span, self._ended = tracer, span, False

    def __bool__(self) -> bool:
        return True

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.fail(failure_of(error))
        self.end()

    def set_attributes(self, attributes: Mapping[str, Value]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str) -> None:
        self._span.add_event(name)

    def fail(self, kind: str) -> None:
        if not self._ended:
            self._span.set_attribute("error.type", kind)
            self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._span.end()

    def child(self, name: str, *, client: bool = False) -> Span:
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        context = set_span_in_context(self._span, _NO_CONTEXT)
        return RecordedSpan(self._tracer, self._tracer.start_span(name, context=context, kind=kind))

    def propagate(self, headers: Mapping[str, str]) -> Mapping[str, str]:
        return _headers(self._span)


def _headers(span: OtelSpan) -> dict[str, str]:
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, context=set_span_in_context(span, _NO_CONTEXT))
    return headers
