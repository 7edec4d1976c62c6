"""NetworkPolicies: the allowed ingress and egress of a deployment's pods.

Policies are additive: users allow more (an object store for a connector, a proxy, a hub mirror inside the cluster) by a
policy of their own. Probes need no rule, because kubelets reach the pods of their node under every policy.
"""

import ipaddress
from collections.abc import Iterable, Sequence
from functools import lru_cache
from ipaddress import IPv4Network, IPv6Network
from typing import Any, Final
from urllib.parse import urlsplit

from mmrouter_lib.api import MMRouterDeployment, Role, SpecError
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT, SIDE_CHANNEL_PORT
from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.child import (
    ChildKind,
    RenderInputs,
    Selector,
    engine_pods,
    frontend_name,
    frontend_pods,
    object_metadata,
)
from mmrouter_operator.render.frontend import CONTROL_PORT, HTTP_PORT, PICKER_PORT
from mmrouter_operator.render.pod.engine import FEED_PORT, FEED_REQUESTS_PORT
from mmrouter_operator.render.pod.parts import METRICS_PORT

KIND: Final = ChildKind("NetworkPolicy", "networking.k8s.io/v1", wave=1, guard="creation")

Rule = dict[str, Any]
Ports = Sequence[int | tuple[int, int]] | None

OPERATOR_LABELS: Final = {"app.kubernetes.io/name": "mmrouter-operator"}
"""Labels of the operator's pods, which read each frontend's control stream."""

DNS_PORTS: Final = (53, 5353)
"""Policies apply to the port behind the Service, and OpenShift's DNS pods listen on 5353."""
API_SERVER_PORTS: Final = (443, 6443)
WEB_PORTS: Final = (80, 443)
HUB_PORTS: Final = (443,)

TRANSFER_ROLES: Final[frozenset[Role]] = frozenset({"encoder", "prefill", "decode"})
"""Roles that transfer tensors between engines. A worker does too if there is an encoder, and every role if there is a
renderer with ``routing.transfer: nixl``."""
TRANSFER_PORTS: Final = (
    (SIDE_CHANNEL_PORT, SIDE_CHANNEL_PORT + 63),  # NIXL, one port per rank
    (8997, BOOTSTRAP_PORT),  # SGLang's bootstrap servers: encoder, prefill
    (14579, 14579),  # vLLM's embedding transfer
    (15000, 17000),  # Mooncake's own range
    (32768, 60999),  # Linux' ephemeral ports: UCX (KV blocks, processed images) and ZMQ
)
"""Port ranges (first, last) on which engines receive tensors from each other; closed to all other pods."""


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the policies of frontend and engines, and one for engines that transfer; none if they are disabled."""
    dep, config = inputs.dep, inputs.config
    if not dep.spec.network_policy.enabled:
        return []
    frontend = _policy(
        dep, frontend_name(dep), "frontend", frontend_pods(dep), _frontend_ingress(dep), _frontend_egress(dep, config)
    )
    engine_name = f"{dep.metadata.name}-engine"
    frontends = {"podSelector": frontend_pods(dep)}
    ingress = [*_rules("from", [frontends], [ENGINE_PORT, FEED_PORT, FEED_REQUESTS_PORT]), _scraped()]
    egress = [_dns(), *(_hub(config) if dep.spec.model.volume is None else [])]
    engine = _policy(dep, engine_name, "engine", engine_pods(dep), ingress, egress)
    roles = _transferring(dep)
    return [frontend, engine, *([_transfer_policy(dep, roles)] if roles else [])]


def _frontend_ingress(dep: MMRouterDeployment) -> list[Rule]:
    peers = {"podSelector": frontend_pods(dep)}
    # The operator's namespace is unknown here, its labels are not. The port requires the control token as well.
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    control = [peers, operator] if dep.spec.frontend.service.page_port is None else None
    # The gateway's pods are unknown here. A picker of engines stays closed, because its answers hold the engines' key.
    open_ports = [HTTP_PORT, *([PICKER_PORT] if dep.spec.frontend.mode == "frontendPicker" else [])]
    return [_rule("from", None, open_ports), _rule("from", control, [CONTROL_PORT]), _scraped()]


def _frontend_egress(dep: MMRouterDeployment, config: OperatorConfig) -> list[Rule]:
    media = dep.spec.routing.media
    rules = [
        _dns(),
        *_rules("to", [{"podSelector": engine_pods(dep)}], [ENGINE_PORT, FEED_PORT, FEED_REQUESTS_PORT]),
        # In a frontend's pod, `mmrouter verify http://NAME` asks the Service, which is any of them.
        *_rules("to", [{"podSelector": frontend_pods(dep)}], [HTTP_PORT, CONTROL_PORT]),
        # Without apiServerCidrs the ports are open to every destination. ``ipBlock: 0.0.0.0/0`` is not equivalent:
        # some network plugins match no node by an address range.
        _rule("to", ranges(config.api_server_cidrs) or None, API_SERVER_PORTS),
    ]
    if media.fetch != "dataOnly":
        # Media may be fetched from allowedHosts on any port. Policies match no host names; the router checks them.
        rules += _rules("to", public(config.pod_cidrs), None if media.allowed_hosts else WEB_PORTS)
        rules += _rules("to", ranges(media.allowed_cidrs), None)
    if dep.spec.model.volume is None:
        rules += _hub(config)  # the model's metadata files
    if dep.spec.observability.otlp_endpoint:
        peers, port = collector(dep.spec.observability.otlp_endpoint)
        rules.append(_rule("to", peers, [port]))
    return rules


def _transferring(dep: MMRouterDeployment) -> list[Role]:
    """Return the roles between which tensors are transferred; empty if there are none."""
    roles: set[Role] = {pool.role for pool in dep.spec.pools}
    if dep.spec.transfer == "nixl":
        return sorted(roles)  # every engine reads images that renderers have processed
    roles -= {"renderer"}
    return sorted(roles) if roles & TRANSFER_ROLES else []


def _transfer_policy(dep: MMRouterDeployment, roles: list[Role]) -> dict[str, Any]:
    engines = engine_pods(dep, *roles)
    ports: list[int | tuple[int, int]] = list(TRANSFER_PORTS)
    if adapter(dep.spec.engine.type).asks_encoders_itself:
        ports.insert(0, ENGINE_PORT)
    peers = [{"podSelector": engines}]
    return _policy(
        dep,
        f"{dep.metadata.name}-transfer",
        "engine",
        engines,
        ingress=_rules("from", peers, ports),
        egress=_rules("to", peers, ports),
    )


def _dns() -> Rule:
    """Allow DNS by port: name servers are pods, a process of the node (NodeLocal DNSCache) or outside the cluster."""
    return {"ports": [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]}


def _scraped() -> Rule:
    """Allow scraping from every namespace. The port serves metrics and health only."""
    return _rule("from", [{"namespaceSelector": {}}], [METRICS_PORT])


def _hub(config: OperatorConfig) -> list[Rule]:
    """Allow the model hub and the stores it redirects to, all public; a mirror may be private, or pods."""
    mirror = host_and_port(config.hub_endpoint)
    if mirror is None:
        return _rules("to", public(config.pod_cidrs), HUB_PORTS)
    return _rules("to", [*anywhere(), {"namespaceSelector": {}}], sorted({*WEB_PORTS, mirror[1]}))


def _rules(side: str, peers: list[dict[str, Any]], ports: Ports) -> list[Rule]:
    """Return one rule, or none without peers: the API takes an empty list of peers for every peer."""
    return [_rule(side, peers, ports)] if peers else []


def _rule(side: str, peers: list[dict[str, Any]] | None, ports: Ports) -> Rule:
    """Return one rule over TCP ports (``None``: all); ``peers`` is ``None`` for every peer."""
    return {**({side: peers} if peers is not None else {}), "ports": _ports(ports)}


def _ports(ports: Ports) -> list[dict[str, Any]]:
    if ports is None:
        return [{"protocol": "TCP"}]
    entries: list[dict[str, Any]] = []
    for port in ports:
        first, last = port if isinstance(port, tuple) else (port, port)
        entries.append({"protocol": "TCP", "port": first, **({"endPort": last} if last != first else {})})
    return entries


def _policy(
    dep: MMRouterDeployment, name: str, component: str, pods: Selector, ingress: list[Rule], egress: list[Rule]
) -> dict[str, Any]:
    spec = {"podSelector": pods, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress}
    return KIND.manifest(object_metadata(dep, name, component), spec=spec)


Network = IPv4Network | IPv6Network


def _networks(text: str) -> tuple[Network, ...]:
    return tuple(ipaddress.ip_network(item) for item in text.split())


NEVER: Final = _networks(
    "169.254.0.0/16 fe80::/10 "
    # Metadata services that are not link-local: AWS, Google (IPv6), Azure, Alibaba, Oracle. They hand out credentials.
    "fd00:ec2::254/128 fd00:ec2::23/128 fd20:ce::254/128 168.63.129.16/32 100.100.100.200/32 192.0.0.192/32"
)
"""Never reachable: link-local addresses and metadata services."""

NOT_PUBLIC: Final = _networks(
    "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 192.88.99.0/24 "
    "192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/4 240.0.0.0/4 "
    "2001::/23 2001:db8::/32 2002::/16 3fff::/20"
)
"""Private, shared (CGNAT), reserved and tunnelled ranges in :data:`PUBLIC`; the router's own guard refuses them too."""

PUBLIC: Final = _networks("0.0.0.0/0 2000::/3")
"""What can be public at all; of IPv6 nothing else is global unicast."""

_NAT64 = IPv6Network("64:ff9b::/96")
_MAPPED = IPv6Network("::ffff:0:0/96")


def anywhere() -> list[dict[str, Any]]:
    """Return peers for every address but :data:`NEVER`."""
    return [peer for base in _networks("0.0.0.0/0 ::/0") for peer in _block(base, NEVER)]


def public(internal: Iterable[str]) -> list[dict[str, Any]]:
    """Return peers for every public address; ``internal`` are CIDRs of this cluster, public or not, that stay out.

    On clusters that have IPv6 alone a public IPv4 address is reached through NAT64, so those addresses are peers too.
    """
    closed = (*NEVER, *NOT_PUBLIC, *(_network(text) for text in internal))
    translated = [_nat64(network) for network in closed if isinstance(network, IPv4Network)]
    return [*(peer for base in PUBLIC for peer in _block(base, closed)), *_block(_NAT64, translated)]


def ranges(cidrs: Iterable[str]) -> list[dict[str, Any]]:
    """Return peers for these CIDRs, without what of :data:`NEVER` lies inside them."""
    return [peer for text in cidrs for peer in _block(_network(text), NEVER)]


def collector(endpoint: str) -> tuple[list[dict[str, Any]] | None, int]:
    """Return peers (``None``: every peer) and port of an OTLP endpoint. Raises ``SpecError`` for a URL without a port.

    A policy knows no host names: for one, the port is open to everywhere.
    """
    place = host_and_port(endpoint)
    if place is None:
        raise SpecError([("spec.observability.otlpEndpoint", f"{endpoint!r:.80} is no URL with a host and a port")])
    host, port = place
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None, port
    return [{"ipBlock": {"cidr": str(ipaddress.ip_network(address))}}], port


def host_and_port(url: str) -> tuple[str, int] | None:
    """Return where an http(s) URL leads to, ``None`` where it does not say."""
    try:
        parts = urlsplit(url)
        port = parts.port if parts.port is not None else {"http": 80, "https": 443}.get(parts.scheme, 0)
        return (parts.hostname, port) if parts.hostname and port else None
    except ValueError:
        return None


def _block(base: Network, closed: Iterable[Network]) -> list[dict[str, Any]]:
    """Return one peer for ``base`` without ``closed``, or none where nothing of it is left."""
    holes = _holes(base, tuple(closed))
    if holes is None:
        return []
    return [{"ipBlock": {"cidr": str(base), "except": list(holes)} if holes else {"cidr": str(base)}}]


@lru_cache(maxsize=256)  # the same few ranges in every rendering, and a millisecond each
def _holes(base: Network, closed: tuple[Network, ...]) -> tuple[str, ...] | None:
    """Return what ``base`` is without of ``closed``, as few ranges; ``None`` where that is all of it."""
    inside: list[Network] = []
    for network in closed:
        if _within(base, network):
            return None
        if _within(network, base):
            inside.append(network)
    # Of one version all of them, as they lie inside one range.
    return tuple(str(network) for network in ipaddress.collapse_addresses(inside))  # type: ignore[type-var]


def _within(inner: Network, outer: Network) -> bool:
    return inner.version == outer.version and inner.subnet_of(outer)  # type: ignore[arg-type]


def _network(text: str) -> Network:
    """Return the range of a CIDR; an IPv4-mapped one is the IPv4 range in it, as connections have that address."""
    network = ipaddress.ip_network(text, strict=False)
    if isinstance(network, IPv6Network) and network.subnet_of(_MAPPED):
        return IPv4Network((int(network.network_address) & 0xFFFF_FFFF, network.prefixlen - 96))
    return network


def _nat64(network: IPv4Network) -> IPv6Network:
    return IPv6Network((int(_NAT64.network_address) | int(network.network_address), network.prefixlen + 96))
