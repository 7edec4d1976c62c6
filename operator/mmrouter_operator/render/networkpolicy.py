"""NetworkPolicies: the allowed ingress and egress of a deployment's pods.

Policies are additive: users allow more (an object store for a connector, a proxy, a hub mirror inside the cluster) by a
policy of their own. Probes need no rule, because kubelets reach the pods of their node under every policy.
"""

from collections.abc import Sequence
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Role
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT, SIDE_CHANNEL_PORT
from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.child import ChildKind, RenderInputs
from mmrouter_operator.render.destinations import anywhere, collector, host_and_port, public, ranges
from mmrouter_operator.render.frontend import CONTROL_PORT, HTTP_PORT
from mmrouter_operator.render.metadata import Selector, engine_pods, frontend_name, frontend_pods, object_metadata
from mmrouter_operator.render.pod.parts import METRICS_PORT
from mmrouter_operator.render.pod.sidecar import FEED_PORT, FEED_REQUESTS_PORT

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
    engine = _policy(dep, engine_name, "engine", engine_pods(dep), _engine_ingress(dep), _engine_egress(dep, config))
    roles = _transferring(dep)
    return [frontend, engine, *([_transfer_policy(dep, roles)] if roles else [])]


def _frontend_ingress(dep: MMRouterDeployment) -> list[Rule]:
    peers = {"podSelector": frontend_pods(dep)}
    # The operator's namespace is unknown here, its labels are not. The port requires the control token as well.
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    return [_rule("from", None, [HTTP_PORT]), *_rules("from", [peers, operator], [CONTROL_PORT]), _scraped()]


def _frontend_egress(dep: MMRouterDeployment, config: OperatorConfig) -> list[Rule]:
    media = dep.spec.routing.media
    rules = [
        _dns(),
        *_rules("to", [{"podSelector": engine_pods(dep)}], [ENGINE_PORT, FEED_PORT, FEED_REQUESTS_PORT]),
        *_rules("to", [{"podSelector": frontend_pods(dep)}], [CONTROL_PORT]),
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


def _engine_ingress(dep: MMRouterDeployment) -> list[Rule]:
    frontends = {"podSelector": frontend_pods(dep)}
    return [*_rules("from", [frontends], [ENGINE_PORT, FEED_PORT, FEED_REQUESTS_PORT]), _scraped()]


def _engine_egress(dep: MMRouterDeployment, config: OperatorConfig) -> list[Rule]:
    return [_dns(), *(_hub(config) if dep.spec.model.volume is None else [])]


def _transferring(dep: MMRouterDeployment) -> list[Role]:
    """Return the roles between which tensors are transferred; empty if there are none."""
    roles: set[Role] = {pool.role for pool in dep.spec.pools}
    if dep.spec.routing.transfer == "nixl":
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
    found: list[dict[str, Any]] = []
    for port in ports:
        first, last = port if isinstance(port, tuple) else (port, port)
        found.append({"protocol": "TCP", "port": first, **({"endPort": last} if last != first else {})})
    return found


def _policy(
    dep: MMRouterDeployment, name: str, component: str, pods: Selector, ingress: list[Rule], egress: list[Rule]
) -> dict[str, Any]:
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_metadata(dep, name, component),
        "spec": {"podSelector": pods, "policyTypes": ["Ingress", "Egress"], "ingress": ingress, "egress": egress},
    }
