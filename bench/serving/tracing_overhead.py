"""What traces cost a router: CPU per request and memory, without an endpoint, with a collector, and with a dead one.

Three routers before one engine, taking turns in every round; every request is traced. The CPU is the whole process's,
the thread that sends spans among it.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.command_child import Child
from bench.feed.fake_sidecars import Curve, FeedEnds, address
from bench.rows import Row, row
from bench.serving.router_processes import Ours, Process

ROUNDS = 6
PLAIN = 400
"""Requests per round and router, one after the other on one connection."""
ENGINE_PORT = 8000
DEAD = "http://127.0.0.1:9"
OFF, ON, LOST = "off", "on", "on, no collector"


@dataclass
class Measured:
    """What was seen of one router."""

    cpu: float = 0.0
    requests: int = 0
    memory: float = 0.0

    @property
    def us(self) -> float:
        """CPU microseconds per request."""
        return self.cpu / self.requests * 1e6


def run() -> list[Row]:
    """Measure the three routers."""
    curve = Curve.fresh()
    with ExitStack() as stack:
        engine = Process(
            "engine",
            [sys.executable, "-m", "bench.serving.plain_engine", address(0), str(ENGINE_PORT)],
            address(0),
            8000,
        )
        stack.enter_context(engine).wait()
        stack.enter_context(FeedEnds(1, curve))
        url, spans = stack.enter_context(collector())
        routers: dict[str, Ours] = {}
        for number, (name, endpoint) in enumerate({OFF: "", ON: url, LOST: DEAD}.items()):
            made = Ours(address(100 + number), [address(0)], curve, policy="roundRobin", otlp=endpoint)
            stack.enter_context(made)
            made.wait()
            routers[name] = made
        load = stack.enter_context(Child("load generator", [sys.executable, "-m", "bench.serving.load_client"]))
        seen = measure(load, routers)
    if sum(spans) < ROUNDS * PLAIN:
        raise RuntimeError(f"the collector got {sum(spans)} spans of {ROUNDS * PLAIN} requests")
    return rows(seen)


def measure(load: Child, routers: dict[str, Ours]) -> dict[str, Measured]:
    """Let every router take its turn in every round."""
    seen = {name: Measured() for name in routers}
    for router in routers.values():
        load.call("plain", host=router.host, port=router.port, count=PLAIN)  # caches and connections
    for _ in range(ROUNDS):
        for name, router in routers.items():
            before = router.cpu()
            load.call("plain", host=router.host, port=router.port, count=PLAIN)
            seen[name].cpu += router.cpu() - before
            seen[name].requests += PLAIN
    for name, router in routers.items():
        seen[name].memory = router.memory()
    return seen


def rows(seen: dict[str, Measured]) -> list[Row]:
    """Return CPU and memory of each, and the ratios to a router without an endpoint."""
    found = [row(f"traces {name}: CPU per request", measured.us, "us") for name, measured in seen.items()]
    for name in (ON, LOST):
        against = f"traces off: {seen[OFF].us:.4g} us"
        found.append(row(f"traces {name}: CPU per request, over off", seen[name].us / seen[OFF].us, "x", peer=against))
    return found + [row(f"traces {name}: memory", measured.memory, "MiB") for name, measured in seen.items()]


@contextmanager
def collector() -> Iterator[tuple[str, list[int]]]:
    """Serve as a collector; yields its URL and the number of spans of each request that it got."""
    spans: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            """Take spans."""
            got = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(len(scope.spans) for resource in got.resource_spans for scope in resource.scope_spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Not on the bench's terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="collector", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()
