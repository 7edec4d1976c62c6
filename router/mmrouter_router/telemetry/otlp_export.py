"""Spans by OpenTelemetry's SDK, exported to a collector by OTLP over HTTP (``observability.otlpEndpoint``).

The SDK's environment variables apply: ``OTEL_TRACES_SAMPLER`` (by default parent-based, all requests),
``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_EXPORTER_OTLP_*``.
"""

import logging
import threading
from collections.abc import Mapping
from types import TracebackType

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Span as OtelSpan
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import mmrouter_lib as mmrouter
from mmrouter_router.telemetry.span_queue import QUEUE, Count, SpanQueue
from mmrouter_router.telemetry.tracing import Headers, Span, Tracing, Value, failure_of, trace_context

log = logging.getLogger("mmrouter.tracing")

CLOSE_SECONDS = 2.0
"""How long the process waits for the collector at its end."""
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
