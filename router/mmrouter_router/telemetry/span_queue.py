"""The way of spans to the collector: a bounded queue, and a thread that empties it. No request waits for either.

What finds the queue full, or a collector that does not take it, is lost and counted.
"""

import logging
import time
from collections.abc import Callable, Sequence

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

log = logging.getLogger("mmrouter.tracing")

QUEUE = 2048
"""Spans that wait for the collector at most, about 2 KiB each."""
BATCH = 128
"""Spans sent at once. They are encoded in Python at 20 to 30 µs each, during which the event loop stands still."""
EXPORTER_LOG = "opentelemetry.exporter.otlp.proto.http.trace_exporter"

Count = Callable[[str, int], None]
"""Takes what became of how many spans: ``exported``, ``failed`` or ``queue_full``."""


class SpanQueue(SpanProcessor):
    """Hands ended spans to a thread that exports them, never more than ``queue`` at a time."""

    def __init__(self, exporter: SpanExporter, count: Count, queue: int) -> None:
        self._exporter, self._count, self._limit = Counted(exporter, count), count, queue
        self._batches = BatchSpanProcessor(
            self._exporter, max_queue_size=queue, max_export_batch_size=min(BATCH, queue)
        )
        self._taken = 0
        self._closed = False

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is sent of a span that has not ended."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue a span, or count it where there is no room. Called by the event loop alone."""
        # Counted here, because the SDK's queue drops the oldest ones and tells only its log.
        if self._closed or self._taken - self._exporter.given >= self._limit:
            self._count("queue_full", 1)
            return
        self._taken += 1
        self._batches.on_end(span)

    def shutdown(self) -> None:
        """Export what waits; blocks while the collector does."""
        self._closed = True
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Export what waits now; blocks while the collector does."""
        return self._batches.force_flush(timeout_millis)


class Counted(SpanExporter):
    """An exporter that counts what became of its spans, and says once when that changes."""

    def __init__(self, exporter: SpanExporter, count: Count) -> None:
        self._exporter, self._count = exporter, count
        self.given = 0
        """Spans that have left the queue."""
        self._lost = 0
        self._words = LastWords()
        logging.getLogger(EXPORTER_LOG).addFilter(self._words)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans; takes up to the exporter's own time limit. Called by the sending thread alone."""
        began = time.monotonic()
        result = self._exporter.export(spans)
        self.given += len(spans)
        if result is SpanExportResult.SUCCESS:
            self._count("exported", len(spans))
            if self._lost:
                log.info("spans are exported again; %d were lost", self._lost)
            self._lost = 0
        else:
            self._count("failed", len(spans))
            if not self._lost:
                seconds = time.monotonic() - began
                log.warning(
                    "spans are lost, after %.1f s of trying: %s", seconds, self._words.said or "no reason given"
                )
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """End the exporter, whatever it is waiting for."""
        self._exporter.shutdown()
        logging.getLogger(EXPORTER_LOG).removeFilter(self._words)

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing is kept here."""
        return True


class LastWords(logging.Filter):
    """Keeps the exporter's latest complaint, of which there is one per batch, out of the log."""

    said = ""

    def filter(self, record: logging.LogRecord) -> bool:
        """Remember it."""
        self.said = record.getMessage()
        return False
