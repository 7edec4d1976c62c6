"""Spans of a request: propagation, attributes, and loss without a collector."""

import asyncio
import logging
import subprocess
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import StatusCode

from mmrouter_router.core.errors import RequestError
from mmrouter_router.scheduling.placer import Decision
from mmrouter_router.telemetry import otlp_export as otlp
from mmrouter_router.telemetry import tracing
from mmrouter_router.telemetry.otlp_export import OtlpTracing
from mmrouter_router.telemetry.tracing import NO_SPAN, child_span, enter, failure_of, outcome, trace_context

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, LEFT_OUT = f"00-{TRACE}-{PARENT}-01", f"00-{TRACE}-{PARENT}-00"


class Collected(SpanExporter):
    """Collects spans; fails while ``down``, blocks while ``free`` is not set. ``counts``: of its tracers."""

    def __init__(self) -> None:
        self.spans, self.counts = [], Counter()
        self.down = False
        self.free = threading.Event()
        self.free.set()

    def count(self, what, number):
        self.counts[what] += number

    def ended(self, tracer):
        """Return the ended spans by name."""
        tracer.queue.force_flush()
        return {span.name: span for span in self.spans}

    def export(self, spans):
        self.free.wait()
        if self.down:
            logging.getLogger(otlp.EXPORTER_LOG).error("connection refused")
            return SpanExportResult.FAILURE
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self):
        self.free.set()


@pytest.fixture
def collected():
    return Collected()


@pytest.fixture
def traced(collected):
    """Make tracers that are closed at the end."""
    made = []

    def make(**options):
        made.append(OtlpTracing(collected, Resource({}), collected.count, **options))
        return made[-1]

    yield make
    collected.free.set()
    for tracer in made:
        tracer.close()


@pytest.fixture
def tracer(traced):
    return traced()


def request(tracer, *headers):
    return tracer.request("POST", "/v1/chat/completions", [(n.encode(), v.encode()) for n, v in headers])


def test_trace_is_propagated_from_client_to_engine(tracer, collected):
    span = request(tracer, ("traceparent", SAMPLED), ("tracestate", "vendor=1"), ("cookie", "secret"))
    part = span.child("engine", client=True)
    headers = part.propagate({"traceparent": SAMPLED, "tracestate": "vendor=1"})
    part.end()
    span.end()
    spans = collected.ended(tracer)
    server, engine = spans["POST /v1/chat/completions"], spans["engine"]
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    assert engine.parent.span_id == server.context.span_id
    assert headers == {"traceparent": f"00-{TRACE}-{engine.context.span_id:016x}-01", "tracestate": "vendor=1"}
    assert (server.kind.name, engine.kind.name) == ("SERVER", "CLIENT")


@pytest.mark.parametrize("given", [[], ["00-zz-1-01"], [SAMPLED, SAMPLED], [f"00-{'0' * 32}-{PARENT}-01"]])
def test_request_without_valid_trace_context_begins_a_trace(tracer, collected, given):
    span = request(tracer, *(("traceparent", value) for value in given), ("tracestate", "vendor=1"))
    outgoing = span.propagate({})
    span.end()
    (server,) = collected.ended(tracer).values()
    assert server.parent is None
    assert server.context.trace_id not in (0, int(TRACE, 16))
    assert outgoing.keys() == {"traceparent"}
    assert outgoing["traceparent"].startswith(f"00-{server.context.trace_id:032x}-{server.context.span_id:016x}-")


def test_unsampled_request_stays_unsampled(tracer, collected):
    with request(tracer, ("traceparent", LEFT_OUT)) as span, span.child("engine", client=True) as part:
        assert not span
        assert not part
        _, trace, _, flags = part.propagate({"traceparent": LEFT_OUT})["traceparent"].split("-")
    assert (trace, flags) == (TRACE, "00")
    assert collected.ended(tracer) == {}


def test_sampler_variable_is_honoured(traced, collected, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    tracer = traced()
    request(tracer).end()
    request(tracer, ("traceparent", SAMPLED)).end()
    assert len(collected.ended(tracer)) == 1


async def test_child_spans_belong_to_the_request_of_their_task(tracer, collected):

    async def serve(name):
        span = request(tracer)
        enter(span)
        with child_span(name):
            await asyncio.sleep(0)
            await asyncio.create_task(inner(f"{name} inner"))
        span.end()
        return int(span.propagate({})["traceparent"].split("-")[2], 16)

    async def inner(name):
        with child_span(name):
            pass

    first, second = await asyncio.gather(serve("a"), serve("b"))
    spans = collected.ended(tracer)
    assert [spans[n].parent.span_id for n in ("a", "a inner", "b", "b inner")] == [first, first, second, second]
    assert child_span("after") is NO_SPAN


def test_failed_span_has_the_kind_of_error_but_not_its_message(tracer, collected):
    span = request(tracer)
    with pytest.raises(RequestError), span.child("fetch image"):
        raise RequestError.invalid("no image at https://host/secret?key=1", param="messages[0]", code="media_timeout")
    with pytest.raises(ValueError, match="secret"), span.child("prompt"):
        raise ValueError("secret")
    span.end()
    spans = collected.ended(tracer)
    assert spans["fetch image"].attributes == {"error.type": "media_timeout"}
    assert spans["prompt"].attributes == {"error.type": "ValueError"}
    assert spans["prompt"].status.status_code is StatusCode.ERROR
    assert not spans["prompt"].events
    assert "secret" not in "".join(one.to_json() for one in spans.values())


def test_decision_attributes_hold_no_client_text():
    winner = SimpleNamespace(name="w-0", pool="worker", overlap=3, unproved=0, tier=0, blocks=5)
    choice = SimpleNamespace(winner=winner, candidates=(winner, winner), reason="cost 2")
    reasons = ("processor_options:messages[0].secret", "unknown:x", "unknown:y")
    values = Decision(None, choice, "kv", "partial", reasons).span_attributes()
    assert values["mmrouter.causes"] == ["processor_options", "unknown"]
    assert [values[f"mmrouter.{name}"] for name in ("overlap_blocks", "prompt_blocks", "candidates")] == [3, 5, 2]
    assert "secret" not in repr(values)


@pytest.mark.parametrize(
    ("code", "attributes", "failure"),
    [
        ("200", {"http.response.status_code": 200}, ""),
        ("429", {"http.response.status_code": 429}, ""),
        ("503", {"http.response.status_code": 503}, "503"),
        ("499", {}, "client_gone"),
        ("broken_off", {}, "broken_off"),
    ],
)
def test_only_server_faults_fail_a_request_span(code, attributes, failure):
    assert outcome(code) == (attributes, failure)


def test_error_without_code_is_named_by_its_class():
    assert failure_of(RequestError(400, "x")) == "RequestError"
    assert failure_of(OSError(2, "path")) == "FileNotFoundError"


def test_only_trace_context_headers_are_propagated():
    headers = [(b"traceparent", b"a"), (b"authorization", b"k"), (b"tracestate", b"b"), (b"tracestate", b"c")]
    assert trace_context(headers) == {"traceparent": "a", "tracestate": "b,c"}
    assert NO_SPAN.propagate({"traceparent": "a"}) == {"traceparent": "a"}


def test_hanging_collector_fills_the_bounded_queue_and_the_rest_is_counted(traced, collected):
    collected.free.clear()
    tracer = traced(queue=8)
    for _ in range(20):
        request(tracer).end()
    assert collected.counts == {"queue_full": 12}
    collected.free.set()
    assert tracer.queue.force_flush()
    assert collected.counts == {"queue_full": 12, "exported": 8}


def test_close_does_not_wait_for_a_hanging_collector(traced, collected, monkeypatch):
    monkeypatch.setattr(otlp, "CLOSE_SECONDS", 0.05)
    collected.free.clear()
    tracer = traced()
    request(tracer).end()
    tracer.close()
    assert not collected.counts, "the export was still unanswered when close returned"
    request(tracer).end()  # lost without an error
    assert collected.counts["queue_full"] == 1
    collected.free.set()


def test_lost_spans_are_counted_each_and_logged_once(traced, collected, caplog):
    caplog.set_level(logging.INFO)
    tracer = traced()
    collected.down = True
    for _ in range(3):
        request(tracer).end()
        tracer.queue.force_flush()
    collected.down = False
    request(tracer).end()
    tracer.queue.force_flush()
    assert collected.counts == {"failed": 3, "exported": 1}
    lost, again = [record.getMessage() for record in caplog.records]
    assert lost.startswith("spans are lost, export failed after ")
    assert lost.endswith(": connection refused")
    assert again == "spans are exported again; 3 were lost"


def test_environment_overrides_endpoint_and_service(monkeypatch):
    assert otlp.traces_url("http://collector:4318/", {}) == "http://collector:4318/v1/traces"
    assert otlp.traces_url("http://collector:4318", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://other:4318"}) is None
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.pod.name=p")
    assert otlp.resource({}).attributes["service.name"] == "mmrouter"
    assert otlp.resource({}).attributes["k8s.pod.name"] == "p"
    monkeypatch.setenv("OTEL_SERVICE_NAME", "qwen-vl-frontend")
    assert otlp.resource({"OTEL_SERVICE_NAME": "x"}).attributes["service.name"] == "qwen-vl-frontend"


def test_sdk_is_loaded_only_with_an_endpoint():
    program = (
        "import sys, mmrouter_router.app\n"
        "from mmrouter_router.build import NO_TRACING, build_tracing\n"
        "assert build_tracing('', None) is NO_TRACING\n"
        "found = [m for m in sys.modules if m.startswith(('opentelemetry.sdk', 'opentelemetry.exporter', 'google'))]\n"
        "assert not found, found\n"
        "assert type(build_tracing('http://127.0.0.1:4318', None)).__name__ == 'OtlpTracing'\n"
        "assert 'opentelemetry.sdk.trace' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_tracing_records_nothing():
    assert tracing.NO_TRACING.request("POST", "/", []) is NO_SPAN
    enter(NO_SPAN)
    assert child_span("prompt") is NO_SPAN
    with child_span("prompt", client=True) as span:
        assert not span
