"""Cost of traces in a router: CPU per request and memory without an endpoint, with a collector, and with a dead one.

Three routers in front of one engine take turns in every round; every request is traced. The CPU is the whole process's,
including the thread that sends spans.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bench.feed.fake_sidecars import address
from bench.measured_process import Child
from bench.rows import Row, row
from bench.serving.router_processes import CpuCost, Process, ServingRig

ROUNDS = 6
PLAIN = 400
"""Requests per round and router, one after the other on one connection."""
DEAD = "http://127.0.0.1:9"
OFF, ON, LOST = "off", "on", "on, no collector"


@dataclass
class RouterCost(CpuCost):
    """CPU per request and MiB of one router."""

    memory: float = 0.0


def run() -> list[Row]:
    """Measure the three routers."""
    with ServingRig() as rig:
        url, spans = rig.enter_context(collector())
        routers = {
            name: rig.start(rig.ours(address(100 + number), policy="roundRobin", otlp=endpoint))
            for number, (name, endpoint) in enumerate({OFF: "", ON: url, LOST: DEAD}.items())
        }
        costs = measure(rig.load_generator(), routers)
    if sum(spans) < ROUNDS * PLAIN:
        raise RuntimeError(f"the collector got {sum(spans)} spans of {ROUNDS * PLAIN} requests")
    return rows(costs)


def measure(load: Child, routers: Mapping[str, Process]) -> dict[str, RouterCost]:
    """Let every router take its turn in every round; a first round fills caches and opens connections."""
    costs = {name: RouterCost() for name in routers}
    for number in range(ROUNDS + 1):
        for name, router in routers.items():
            before = router.cpu()
            load.call("plain", **router.address, count=PLAIN)
            if number:
                costs[name].add(router.cpu() - before, PLAIN)
    for name, router in routers.items():
        costs[name].memory = router.memory()
    return costs


def rows(costs: dict[str, RouterCost]) -> list[Row]:
    """Return CPU and memory of each router, and the ratios to the one without an endpoint."""
    off = costs[OFF].us
    result = [row(f"traces {name}: CPU per request", cost.us, "us") for name, cost in costs.items()]
    for name in (ON, LOST):
        peer = f"traces off: {off:.4g} us"
        result.append(row(f"traces {name}: CPU per request, over off", costs[name].us / off, "x", peer=peer))
    return result + [row(f"traces {name}: memory", cost.memory, "MiB") for name, cost in costs.items()]


@contextmanager
def collector() -> Iterator[tuple[str, list[int]]]:
    """Run a trace collector; yields its URL and the number of spans of each request that it got."""
    spans: list[int] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            batch = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            spans.extend(len(scope.spans) for resource in batch.resource_spans for scope in resource.scope_spans)
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="collector", daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()
