"""Bounded queue of spans with a thread that exports them, so that no request waits for the collector.

Spans that find the queue full, or that the collector does not accept, are lost and counted.
"""

import logging
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = logging.getLogger("mmrouter.tracing")

QUEUE = 2048
"""Maximum of queued spans, about 2 KiB each."""
BATCH = 128
"""Spans per export. Encoding takes 20 to 30 µs each in Python, during which the event loop stalls."""
EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

Count = Callable[[str, int], None]
"""Counts spans by result: ``exported``, ``failed`` or ``queue_full``."""


class SpanQueue(SpanProcessor):
    """Hands ended spans to an exporting thread, at most ``queue`` at a time."""

    def __init__(self, exporter: SpanExporter, count: Count, queue: int) -> None:
        self._exporter, self._count, self._limit = CountingExporter(exporter, count), count, queue
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=queue, max_export_batch_size=min(BATCH, queue)
        )
        self._queued = 0
        self._closed = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        pass

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or count it as lost. Called by the event loop only."""
        # The SDK's own queue would drop the oldest spans and only log it.
        if self._closed or self._queued - self._exporter.processed >= self._limit:
            self._count("queue_full", 1)
            return
        self._queued += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export the queue; blocks while the collector does."""
        self._closed = True
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export the queue now; blocks while the collector does."""
        return self._batches.force_flush(timeout_millis)


class CountingExporter(SpanExporter):
    """Wraps an exporter: counts spans by result, and logs when exports begin to fail or to succeed again."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter, self._count = exporter, count
        self.processed = 0
        """Spans that have left the queue."""
        self._lost = 0
        self._errors = LastErrorFilter()
        logging.getLogger(EXPORTER_LOG).addFilter(self._errors)

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

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return True


class LastErrorFilter(logging.Filter):
    """Keeps the exporter's message per failed batch out of the log, and remembers the latest."""

    last = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.last = record.getMessage()
        return False
