"""Traces of a whole deployment: from the client's trace through the router into the engine, at a real collector."""

import json
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from local.rig import ROOT, Deployment, deployed, example
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from scenarios import Folder
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
UNSAID = {"http.request.method", "http.route"}
"""Attributes that the page leaves out: the span's name has them."""
SECRET = "xyzzy-secret-of-a-prompt"

ENGINE = """#!{python}
# The simulated engine, with a note of each request's headers.
import json, sys
from mmrouter_sim.vllm import app

build = app.build

def noted(engine):
    inner = build(engine)

    async def outer(scope, receive, send):
        if scope["type"] == "http" and scope["method"] == "POST":
            headers = {{name.decode(): value.decode() for name, value in scope["headers"]}}
            with open({notes!r}, "a") as file:
                file.write(json.dumps({{"path": scope["path"], "headers": headers}}) + "\\n")
        await inner(scope, receive, send)

    return outer

app.build = noted
from mmrouter_sim.__main__ import main
sys.exit(main(["vllm", *sys.argv[1:]]))
"""


class Collector:
    """Takes OTLP over HTTP and keeps the spans, with their resource's attributes."""

    def __init__(self) -> None:
        self.spans: list[SimpleNamespace] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                collector.spans += list(parsed(body))  # in one step, because other threads read it
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def of(self, request_id: str) -> dict[str, list[SimpleNamespace]]:
        """Spans of one request by name, once all of them are there."""

        def tree() -> dict[str, list[SimpleNamespace]] | None:
            servers = [s for s in self.spans if s.attributes.get("mmrouter.request_id") == request_id]
            found: dict[str, list[SimpleNamespace]] = {}
            for span in self.spans:
                if servers and span.trace == servers[0].trace:
                    found.setdefault(span.name, []).append(span)
            return found or None

        # A request's span ends last, and what ended before it is sent before it or with it.
        found: dict[str, list[SimpleNamespace]] = wait_for(tree, 20, f"the spans of {request_id}")
        return found


def value(any_value: Any) -> Any:
    kind = any_value.WhichOneof("value")
    return [value(v) for v in any_value.array_value.values] if kind == "array_value" else getattr(any_value, kind)


def parsed(body: bytes) -> Iterator[SimpleNamespace]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        about = {row.key: value(row.value) for row in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SimpleNamespace(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    attributes={row.key: value(row.value) for row in span.attributes},
                    events=[event.name for event in span.events],
                    began=span.start_time_unix_nano,
                    ended=span.end_time_unix_nano,
                    about=about,
                    raw=str(span),
                )


@contextmanager
def tracing(folder: Path, endpoint: str) -> Iterator[tuple[Deployment, Path]]:
    """Two simulated engines that note their requests' headers, one frontend that traces."""
    notes = folder / "requests.jsonl"
    (folder / "bin").mkdir()
    engine = folder / "bin" / "vllm"
    engine.write_text(ENGINE.format(python=sys.executable, notes=str(notes)))
    engine.chmod(engine.stat().st_mode | stat.S_IXUSR)
    resource = example()
    spec = resource["spec"]
    spec["observability"] = {"otlpEndpoint": endpoint} if endpoint else {}
    all_of_them = [{"name": "OTEL_TRACES_SAMPLER", "value": "parentbased_always_on"}]
    spec["frontend"]["podTemplate"] = {"spec": {"containers": [{"name": "router", "env": all_of_them}]}}
    spec["frontend"]["replicas"], spec["pools"][0]["replicas"] = 1, 2
    with deployed(folder, resource, options=("--engines", "path", "--engine-env", str(folder))) as deployment:
        yield deployment, notes


def seen(notes: Path, request_id: str) -> dict[str, str]:
    """The headers with which the engine got a request."""
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    (headers,) = (row["headers"] for row in rows if row["headers"].get("x-request-id") == request_id)
    found: dict[str, str] = headers
    return found


def ask(deployment: Deployment, url: str, **headers: str) -> httpx.Response:
    content = [
        {"type": "text", "text": f"{SECRET} " + "what is to be seen in this picture here? " * 4},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
    return httpx.post(f"{deployment.url}/v1/chat/completions", json=body, headers=headers, timeout=30, trust_env=False)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture(scope="module")
def traced(collector: Collector, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, Path]]:
    with tracing(tmp_path_factory.mktemp("traced"), collector.url) as made:
        yield made


def test_the_clients_trace_goes_through_the_router_into_the_engine(
    traced: tuple[Deployment, Path], collector: Collector, web: Folder
) -> None:
    deployment, notes = traced
    link = f"00-{TRACE}-{PARENT}-01"
    image_url = web.put("a.png", picture("traced")) + f"?key={SECRET}"
    answer = ask(deployment, image_url, traceparent=link, tracestate="vendor=1")
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-mmrouter-request-id"]
    tree = collector.of(request_id)
    assert set(tree) == {
        "POST /v1/chat/completions", "receive", "intake", "fetch image", "prompt", "schedule", "engine"
    }  # fmt: skip
    (server,), (engine,) = tree.pop("POST /v1/chat/completions"), tree["engine"]
    assert (server.trace, server.parent) == (TRACE, PARENT)
    for (part,) in tree.values():
        assert part.parent == server.id
        assert server.began <= part.began <= part.ended <= server.ended
    assert seen(notes, request_id)["traceparent"][:-3] == f"00-{TRACE}-{engine.id}"
    assert seen(notes, request_id)["tracestate"] == "vendor=1"

    assert server.attributes["http.response.status_code"] == 200
    decided = deployment.decision(answer)
    note = tree["schedule"][0].attributes
    assert {key: note[f"mmrouter.{key}"] for key in ("worker", "policy", "exactness")} == {
        key: decided[key] for key in ("worker", "policy", "exactness")
    }
    assert (note["mmrouter.overlap_blocks"], note["mmrouter.prompt_blocks"]) == (decided["overlap"], decided["blocks"])
    assert note["mmrouter.candidates"] == len(decided["candidates"]) == 2
    assert tree["prompt"][0].attributes["mmrouter.prompt_tokens"] == decided["prompt_tokens"]
    assert engine.attributes["mmrouter.worker"] == decided["worker"]
    assert engine.events == ["first byte"]
    assert not [span.raw for span in collector.spans if SECRET in span.raw or "a.png" in span.raw]

    page = (ROOT / "docs" / "observability.md").read_text()
    assert {key for span in collector.spans for key in span.attributes if f"`{key}`" not in page} <= UNSAID

    # The pod that it was, by what the operator renders and the downward API fills in.
    (router,) = deployment.processes("router")
    assert server.about["k8s.pod.name"] == router
    assert server.about["service.name"] == server.about["k8s.deployment.name"] == "demo-frontend"
    assert server.about["k8s.namespace.name"] == "default"


def test_a_request_without_a_trace_begins_one_and_one_that_is_left_out_stays_out(
    traced: tuple[Deployment, Path], collector: Collector
) -> None:
    deployment, notes = traced
    image = data_uri(picture("left out"))
    quiet = ask(deployment, image, traceparent=f"00-{'12' * 16}-{PARENT}-00").headers["x-mmrouter-request-id"]
    fresh = ask(deployment, image).headers["x-mmrouter-request-id"]
    tree = collector.of(fresh)
    (server,), (engine,) = tree["POST /v1/chat/completions"], tree["engine"]
    assert server.parent == ""
    assert seen(notes, fresh)["traceparent"].startswith(f"00-{server.trace}-{engine.id}-")
    assert "fetch image" not in tree  # it came inline
    _, trace, _, flags = seen(notes, quiet)["traceparent"].split("-")
    assert (trace, flags) == ("12" * 16, "00")
    assert not [span for span in collector.spans if span.trace == "12" * 16]


def test_a_refused_request_has_a_span_and_is_the_clients_failure(
    traced: tuple[Deployment, Path], collector: Collector
) -> None:
    deployment, _ = traced
    refused = httpx.post(f"{deployment.url}/v1/chat/completions", content=b"{", trust_env=False)
    assert refused.status_code == 400
    tree = collector.of(refused.headers["x-mmrouter-request-id"])
    (server,) = tree["POST /v1/chat/completions"]
    assert server.attributes["http.response.status_code"] == 400
    assert "error.type" not in server.attributes
    assert tree["intake"][0].attributes["error.type"] == "invalid_json"
    assert set(tree) == {"POST /v1/chat/completions", "receive", "intake"}


def test_without_an_endpoint_the_engine_gets_the_clients_own_trace_and_with_a_dead_one_no_request_waits(
    tmp_path: Path, collector: Collector
) -> None:
    link = f"00-{TRACE}-{PARENT}-01"
    for name, endpoint in {"off": "", "dead": "http://127.0.0.1:9"}.items():
        folder = tmp_path / name
        folder.mkdir()
        with tracing(folder, endpoint) as (deployment, notes):
            image = data_uri(picture(name))
            for _ in range(5):
                answer = ask(deployment, image, traceparent=link, tracestate="vendor=1")
                assert answer.status_code == 200
            headers = seen(notes, answer.headers["x-mmrouter-request-id"])
            assert headers["tracestate"] == "vendor=1"
            assert (headers["traceparent"] == link) == (name == "off")
            (router,) = deployment.processes("router").values()
            loaded = {Path(row.path).name for row in router.memory_maps() if "_upb" in row.path}
            assert bool(loaded) == (name == "dead")
            if name == "dead":
                lost = partial(deployment.metric, "mmrouter_spans_total", result="failed")
                wait_for(lost, 30, "the lost spans are counted")
