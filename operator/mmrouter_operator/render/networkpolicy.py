"""NetworkPolicies: whom the pods of a deployment may talk to, and who may talk to them.

Policies add up, so whoever needs more (an object store for a connector, a proxy, a hub mirror inside the cluster) adds
one of their own beside these. Kubelets reach the pods of their node whatever a policy says: probes need no rule.
"""

from collections.abc import Sequence
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Role
from mmrouter_lib.engines import adapter
from mmrouter_lib.engines.base.launch import BOOTSTRAP_PORT, SIDE_CHANNEL_PORT
from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.common import METRICS_PORT, frontend_name, object_metadata
from mmrouter_operator.render.destinations import anywhere, collector, host_and_port, public, ranges
from mmrouter_operator.render.frontend import CONTROL_PORT, HTTP_PORT
from mmrouter_operator.render.pool import FEED_PORT, FEED_REQUESTS_PORT
from mmrouter_operator.render.selectors import Selector, engine_pods, frontend_pods

Rule = dict[str, Any]
Ports = Sequence[int | tuple[int, int]] | None

OPERATOR_LABELS: Final = {"app.kubernetes.io/name": "mmrouter-operator"}
"""Labels of the operator's own pods, which follow each frontend's stream."""

DNS_PORTS: Final = (53, 5353)
"""Policies see the port behind the Service, and OpenShift's DNS pods listen on 5353."""
API_SERVER_PORTS: Final = (443, 6443)
WEB_PORTS: Final = (80, 443)
HUB_PORTS: Final = (443,)

TRANSFER_ROLES: Final[frozenset[Role]] = frozenset({"encoder", "prefill", "decode"})
"""Roles that hand tensors to other engines or take them from others; a worker does beside an encoder, and everybody
beside a renderer with ``routing.transfer: nixl``."""
TRANSFER_PORTS: Final = (
    (SIDE_CHANNEL_PORT, SIDE_CHANNEL_PORT + 63),  # NIXL, one port per rank
    (8997, BOOTSTRAP_PORT),  # SGLang's bootstrap servers: encoder, prefill
    (14579, 14579),  # vLLM's embedding transfer
    (15000, 17000),  # Mooncake's own range
    (32768, 60999),  # what UCX (KV blocks, processed images) and ZMQ are given by Linux
)
"""First and last port on which engines take tensors from each other, none of them for anybody else."""


def render_networkpolicies(dep: MMRouterDeployment, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the policies of frontend and engines, and one for engines that transfer; nothing where they are off."""
    if not dep.spec.network_policy.enabled:
        return []
    transferring = _transferring(dep)
    return [
        _policy(
            dep,
            frontend_name(dep),
            "frontend",
            frontend_pods(dep),
            _frontend_ingress(dep),
            _frontend_egress(dep, config),
        ),
        _policy(
            dep,
            f"{dep.metadata.name}-engine",
            "engine",
            engine_pods(dep),
            _engine_ingress(dep),
            _engine_egress(dep, config),
        ),
        *([_transfer_policy(dep, transferring)] if transferring else []),
    ]


def _frontend_ingress(dep: MMRouterDeployment) -> list[Rule]:
    peers = {"podSelector": frontend_pods(dep)}
    # The operator's namespace is not known here; its label is. The port wants the control token besides.
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": dict(OPERATOR_LABELS)}}
    return [_rule("from", None, [HTTP_PORT]), *_rules("from", [peers, operator], [CONTROL_PORT]), _scraped()]


def _frontend_egress(dep: MMRouterDeployment, config: OperatorConfig) -> list[Rule]:
    media = dep.spec.routing.media
    rules = [
        _dns(),
        *_rules("to", [{"podSelector": engine_pods(dep)}], [ENGINE_PORT, FEED_PORT, FEED_REQUESTS_PORT]),
        *_rules("to", [{"podSelector": frontend_pods(dep)}], [CONTROL_PORT]),
        # Where the API server is, only the site knows; without a word from it the ports are open to everywhere.
        # ``ipBlock: 0.0.0.0/0`` would not do: some network plugins match no node by an address range.
        _rule("to", ranges(config.api_server_cidrs) or None, API_SERVER_PORTS),
    ]
    if media.fetch != "dataOnly":
        # A host in allowedHosts may be fetched from on any port. Policies know no hosts: the router's guard does.
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
    """Return the roles between which tensors travel; empty where every engine works for itself."""
    roles: set[Role] = {pool.role for pool in dep.spec.pools}
    if dep.spec.routing.transfer == "nixl":
        return sorted(roles)  # every engine reads what renderers have processed
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
    """Name servers are pods, a process of the node (NodeLocal DNSCache, link-local) or outside: the port is known."""
    return {"ports": [{"protocol": protocol, "port": port} for port in DNS_PORTS for protocol in ("UDP", "TCP")]}


def _scraped() -> Rule:
    """Prometheus may be in any namespace and under any name. The port shows numbers and health, and takes no orders."""
    return _rule("from", [{"namespaceSelector": {}}], [METRICS_PORT])


def _hub(config: OperatorConfig) -> list[Rule]:
    """The model hub and the stores that it redirects to, all public; a mirror may have a private address or be pods."""
    mirror = host_and_port(config.hub_endpoint)
    if mirror is None:
        return _rules("to", public(config.pod_cidrs), HUB_PORTS)
    return _rules("to", [*anywhere(), {"namespaceSelector": {}}], sorted({*WEB_PORTS, mirror[1]}))


def _rules(side: str, peers: list[dict[str, Any]], ports: Ports) -> list[Rule]:
    """Return one rule, or none without peers: an empty list of peers would mean anybody to the API server."""
    return [_rule(side, peers, ports)] if peers else []


def _rule(side: str, peers: list[dict[str, Any]] | None, ports: Ports) -> Rule:
    """Return one rule over TCP ports (``None``: all); ``peers`` is ``None`` for anybody."""
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
