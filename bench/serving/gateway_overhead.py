"""CPU and latency of ways to send a request to the deployment of its model (docs/gateway.md, *many models, one
address*).

``mmrouter gateway`` against Envoy in two configurations: with the same decision by ext_proc, in a process of Python
that gets each body; and without it, where Envoy itself reads the model and cannot keep conversations in a split. Every
process that a way needs counts.
"""

import asyncio
import base64
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import uvloop

from bench.child_process import Child, Process
from bench.feed.fake_sidecars import address
from bench.placing.workload import padded_png
from bench.report import Row, not_run, percentile, row
from bench.serving.minimal_engine import TOKENS
from bench.serving.router_processes import CpuCost, Server
from mmrouter_cli.local.envoy import find_envoy
from mmrouter_cli.local.folders import LocalError
from mmrouter_lib.engines.base.request_fields import CHAT
from mmrouter_router.gateway import app
from mmrouter_router.gateway.model_routes import Deployment, Routes
from mmrouter_router.gateway.requested_model import routed
from mmrouter_router.picker import wire

ROUNDS, CONNECTIONS = 3, 4
PLAIN, STREAMS, IMAGES = 100, 5, 10
"""Requests per connection and round."""
IMAGE_BYTES: Final = 1_050_000  # 1.4 MB as base64
PORT: Final = 8000
DECISION_PORT: Final = 9002
MAX_BODY: Final = 64 << 20
OURS, DECIDED, ENVOY = "mmrouter gateway", "Envoy, decision by ext_proc in Python", "Envoy alone, without splits"
HEADER: Final = "x-mmrouter-deployment"
_TYPE: Final = "type.googleapis.com/envoy.extensions.filters"


def run() -> list[Row]:
    with ExitStack() as stack:
        engine = [sys.executable, "-m", "bench.serving.minimal_engine", str(PORT), address(0)]
        stack.enter_context(Server("engine", engine, address(0), PORT)).wait()
        ways: dict[str, tuple[Server, tuple[Process, ...]]] = {}
        ours = stack.enter_context(_module("ours", address(901)))
        ways[OURS] = ours, (ours,)
        try:
            decision = stack.enter_context(_module("decision", address(902)))
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            envoy = stack.enter_context(_envoy(folder / "decided.json", address(903), decision=address(902)))
            ways[DECIDED] = envoy, (envoy, decision)
            alone = stack.enter_context(_envoy(folder / "alone.json", address(904)))
            ways[ENVOY] = alone, (alone,)
            missing = ""
        except LocalError as error:
            missing = str(error)
        for server, _ in ways.values():
            server.wait()
        load = stack.enter_context(Child.module("bench.serving.load_generator"))
        image = "data:image/png;base64," + base64.b64encode(padded_png(IMAGE_BYTES)).decode()
        costs: defaultdict[tuple[str, str], CpuCost] = defaultdict(CpuCost)
        answers: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
        for _ in range(ROUNDS):
            for name, (server, processes) in ways.items():
                with costs[name, "short chat"].of(CONNECTIONS * PLAIN, *processes):
                    chats = load.call("plain", **server.address, connections=CONNECTIONS, count=PLAIN)
                with costs[name, f"stream of {TOKENS} tokens"].of(CONNECTIONS * STREAMS, *processes):
                    load.call("streams", **server.address, connections=CONNECTIONS, count=STREAMS, pause_ms=10)
                with costs[name, "chat with an image of 1.4 MB"].of(CONNECTIONS * IMAGES, *processes):
                    images = load.call("plain", **server.address, connections=CONNECTIONS, count=IMAGES, image=image)
                answers[name, "short chat"] += chats["us"]
                answers[name, "chat with an image of 1.4 MB"] += images["us"]
        made = rows("CPU per request", {key: cost.us for key, cost in costs.items()}, missing)
        for share, label in ((0.5, "p50"), (0.99, "p99")):
            made += rows(label, {key: percentile(us, share) for key, us in answers.items()}, missing)
        return made


def rows(what: str, us: Mapping[tuple[str, str], float], missing: str) -> list[Row]:
    """Return a figure of each kind of request, and its ratio to each other way's. ``us``: by way and kind."""
    made = []
    for kind in dict.fromkeys(kind for _, kind in us):
        made.append(row(f"gateway, {kind}: {what}", us[OURS, kind], "us"))
        for other in (DECIDED, ENVOY):
            name = f"gateway, {kind}: {what}, over {other}"
            if (theirs := us.get((other, kind))) is None:
                made.append(not_run(name, "x", missing))
            else:
                made.append(row(name, us[OURS, kind] / theirs, "x", peer=f"{other}: {theirs:.4g} us"))
    return made


def _module(role: str, host: str) -> Server:
    return Server(role, [sys.executable, "-m", "bench.serving.gateway_overhead", role, host, address(0)], host, PORT)


def _envoy(file: Path, host: str, decision: str = "") -> Server:
    """Return Envoy with one listener; ``decision``: where its ext_proc asks, else it reads the model itself."""
    file.write_text(json.dumps(envoy_config(host, decision)))
    options = ("--concurrency", "1", "--disable-hot-restart")
    return Server(f"Envoy, {file.stem}", [find_envoy(), "-c", str(file), *options], host, PORT)


def envoy_config(host: str, decision: str) -> dict[str, Any]:
    """Return Envoy's configuration with one route per deployment."""
    if decision:
        by_model = {
            "name": "decision",
            "typed_config": {
                "@type": f"{_TYPE}.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "decision"}},
                "processing_mode": {
                    # Without it the headers reach the router before the body's decision.
                    "request_header_mode": "SEND",
                    "response_header_mode": "SKIP",
                    "request_body_mode": "BUFFERED",
                },
                "message_timeout": "60s",
            },
        }
        match: dict[str, Any] = {"prefix": "/", "headers": [{"name": HEADER, "string_match": {"exact": "bench"}}]}
    else:
        by_model = {
            "name": "model",
            "typed_config": {
                "@type": f"{_TYPE}.http.json_to_metadata.v3.JsonToMetadata",
                "request_rules": {
                    "rules": [
                        {
                            "selectors": [{"key": "model"}],
                            "on_present": {"metadata_namespace": "mmrouter", "key": "model"},
                            "on_missing": {"metadata_namespace": "mmrouter", "key": "model", "value": "none"},
                        }
                    ]
                },
            },
        }
        value = {"string_match": {"exact": "bench"}}
        match = {
            "prefix": "/",
            "dynamic_metadata": [{"filter": "mmrouter", "path": [{"key": "model"}], "value": value}],
        }
    route = {"match": match, "route": {"cluster": "bench", "timeout": "0s"}}
    unknown = {"match": {"prefix": "/"}, "direct_response": {"status": 404}}
    hosts = [{"name": "all", "domains": ["*"], "routes": [route, unknown]}]
    manager = {
        "@type": f"{_TYPE}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "clients",
        "route_config": {"name": "all", "virtual_hosts": hosts},
        "http_filters": [by_model, {"name": "router", "typed_config": {"@type": f"{_TYPE}.http.router.v3.Router"}}],
    }
    options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    http2 = {"@type": f"type.googleapis.com/{options}", "explicit_http_config": {"http2_protocol_options": {}}}
    clusters = [_cluster("bench", address(0), PORT)]
    if decision:
        clusters.append(
            _cluster("decision", decision, DECISION_PORT) | {"typed_extension_protocol_options": {options: http2}}
        )
    listener = {
        "name": "clients",
        "address": _address(host, PORT),
        "per_connection_buffer_limit_bytes": MAX_BODY,
        "filter_chains": [{"filters": [{"name": "http", "typed_config": manager}]}],
    }
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _cluster(name: str, host: str, port: int) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(host, port)}}]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


# -- processes


def serve_ours(host: str, deployment: Deployment) -> None:
    async def discover(update: Any, metrics: Any) -> None:
        update((deployment,))

    app.main(app.GatewaySettings(host=host, port=PORT), discover)


def serve_decision(host: str, deployment: Deployment) -> None:
    """Answer ext_proc's bodies with the deployment of their model, as a header."""
    routes = Routes([deployment], {})

    async def process(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            response = wire.ProcessingResponse()
            if request.HasField("request_headers"):
                response.request_headers.SetInParent()
                yield response
                continue
            choice = routed(CHAT, request.request_body.body, routes, MAX_BODY).choice
            changed = response.request_body.response
            header = changed.header_mutation.set_headers.add()
            header.header.key, header.header.raw_value = HEADER, choice.deployment.name.encode()
            changed.clear_route_cache = True
            yield response

    async def serve() -> None:
        handler = grpc.stream_stream_rpc_method_handler(
            process, wire.ProcessingRequest.FromString, wire.ProcessingResponse.SerializeToString
        )
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(wire.EXT_PROC_SERVICE, {"Process": handler}),)
        )
        server.add_insecure_port(f"{host}:{DECISION_PORT}")
        await server.start()
        await asyncio.Event().wait()

    uvloop.run(serve())


def main(arguments: Sequence[str]) -> None:
    role, host, engine = arguments
    {"ours": serve_ours, "decision": serve_decision}[role](host, Deployment("bench", "bench", engine, PORT))


if __name__ == "__main__":
    main(sys.argv[1:])
