"""Checks of the way from a gateway to a deployment: its objects, the pickers' ports, limits of bodies. Pure."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from mmrouter_cli.doctor.findings import (
    DeploymentFacts,
    Finding,
    GatewayFacts,
    Object,
    RoutingFacts,
    ok,
    problem,
    reason_advice,
    unread,
    warning,
)
from mmrouter_cli.status.control_api import NOT_RUNNING, Unread
from mmrouter_lib.api import MMRouterDeployment, quantity_bytes
from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_operator.model.kinds import CHILD_SELECTOR, DEPLOYMENT_LABEL, FRONTEND_ROLE, ROLE_LABEL
from mmrouter_operator.model.views import child_view
from mmrouter_operator.render.frontend import PICKER_PORT
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions_from_gateways import gateway_reports

_MANAGED_BY, _, _OPERATOR = CHILD_SELECTOR.partition("=")


def gateway_check(facts: DeploymentFacts, dep: MMRouterDeployment, frontends: RoutingFacts | None) -> Iterator[Finding]:
    """Check that gateways accept the deployment's objects, reach its pickers, and let its requests through."""
    gateway = facts.gateway
    if gateway is None:
        return
    yield from _reports(gateway, dep)
    if dep.spec.frontend.has_picker:
        if frontends is not None:
            yield from picker_check(frontends, tls=dep.spec.frontend.picker_tls != "none")
        yield from _reached(gateway, dep, frontends)
    yield from _limits(gateway, dep)


def _reports(gateway: GatewayFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    if isinstance(gateway.objects, Unread):
        yield unread("the InferencePool and the HTTPRoute", gateway.objects)
    elif gateway.objects is not None:
        views = {(obj["kind"], obj["metadata"]["name"]): child_view(obj) for obj in gateway.objects}
        reports = gateway_reports(dep, views)
        yield from (problem(sentence, reason_advice(c.GATEWAY, "NotAccepted")) for sentence in reports.refused)
        yield from (problem(sentence, reason_advice(c.GATEWAY, "NotReported")) for sentence in reports.missing)
        yield from map(ok, reports.accepted)


def picker_check(facts: RoutingFacts, tls: bool | None = None) -> Iterator[Finding]:
    """Check that pickers report their health to gateways. ``tls``: what gateways should find, ``None``: not known."""
    spoken = {True: "TLS", False: "plain HTTP/2"}
    for name, health in facts.pickers:
        if isinstance(health, Unread):
            if health.why != NOT_RUNNING:  # a finding of the frontends
                yield warning(f"the health of the picker of {name} cannot be read: {health.why}", facts.advice)
        elif health.tls is None:
            do = f"See the log of its router: the picker listens on port {PICKER_PORT} once it has started."
            yield problem(f"the picker of {name} {health.fault}", do)
        elif tls is not None and health.tls != tls:
            yield problem(
                f"the picker of {name} serves {spoken[health.tls]}, and by frontend.pickerTls it should serve "
                f"{spoken[tls]}",
                "Wait until the frontends run with the new field; see pods.",
            )
        elif health.fault:
            do = "Gateways send no request to it until its router is Ready and can place requests: see frontends."
            yield problem(f"the picker of {name} {health.fault}", do)
        else:
            yield ok(f"the picker of {name} serves gateways by {spoken[health.tls]}")


def _reached(gateway: GatewayFacts, dep: MMRouterDeployment, frontends: RoutingFacts | None) -> Iterator[Finding]:
    """Check that gateways ask the pickers; where none has, that the network policies let them."""
    states = [frontend.second for frontend in (frontends.frontends if frontends is not None else ())]
    counts = [state.get("gateway_requests") for state in states if not isinstance(state, Unread)]
    asked = [count for count in counts if count is not None]
    if total := sum(asked):
        yield ok(f"gateways have asked the pickers {total} times")
        return
    # The operator's own policy opens the ports of a picker of frontends.
    if dep.spec.frontend.mode == "endpointPicker":
        closed = list(_closed(gateway, dep))
        yield from closed
        if any(finding.level == "problem" for finding in closed):
            return
    if asked:
        plain = dep.spec.frontend.picker_tls == "none"
        tls = "expects plain HTTP/2, not TLS" if plain else "expects TLS, not plain HTTP/2"
        yield warning(
            f"no gateway has asked a picker since it started; port {PICKER_PORT} {tls}",
            "Send a request to the gateway. Where it answers 5xx, docs/gateway.md says what a gateway needs.",
        )


def _closed(gateway: GatewayFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that a network policy opens the ports that a gateway needs."""
    if isinstance(gateway.policies, Unread):
        yield unread("network policies", gateway.policies)
    elif dep.spec.network_policy.enabled:
        targets = {"frontends": (FRONTEND_ROLE, PICKER_PORT), "workers": ("worker", ENGINE_PORT)}
        closed = [
            f"{port} of the {name}"
            for name, (role, port) in targets.items()
            if not _opened(gateway.policies, {DEPLOYMENT_LABEL: dep.metadata.name, ROLE_LABEL: role}, port)
        ]
        if closed:
            yield problem(
                f"no NetworkPolicy opens port {' and port '.join(closed)}, so a gateway cannot ask the pickers",
                "Open both to the gateway's pods with the policy of docs/gateway.md.",
            )


def _opened(policies: Sequence[Object], labels: Mapping[str, str], port: int) -> bool:
    """Whether a policy that is not the operator's opens a port of the pods with these labels."""
    return any(
        (policy["metadata"].get("labels") or {}).get(_MANAGED_BY) != _OPERATOR
        and _selects(policy["spec"].get("podSelector") or {}, labels)
        and any(_has_port(rule, port) for rule in policy["spec"].get("ingress") or [])
        for policy in policies
    )


def _selects(selector: Object, labels: Mapping[str, str]) -> bool:
    """Whether a selector may match pods that have at least these labels; they may have others."""
    wanted = selector.get("matchLabels") or {}
    if any(key in labels and labels[key] != value for key, value in wanted.items()):
        return False
    for expression in selector.get("matchExpressions") or []:
        value, values = labels.get(expression["key"]), expression.get("values") or []
        if value is not None and {"In": value not in values, "NotIn": value in values, "DoesNotExist": True}.get(
            expression["operator"], False
        ):
            return False
    return True


def _has_port(rule: Object, port: int) -> bool:
    ports = rule.get("ports") or []
    return not ports or any(
        isinstance(first := entry.get("port", port), str) or first <= port <= entry.get("endPort", first)
        for entry in ports
    )


def _nginx_size(text: str) -> int | None:
    """Return a size of nginx in bytes, ``None`` for one that is no limit."""
    match = re.fullmatch(r"([0-9]+)([kmg]?)", text.lower())
    return (int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2]]) or None if match else None


class LimitKind(NamedTuple):
    """A kind of policy that limits the bodies of requests."""

    api: str
    plural: str
    field: tuple[str, str]
    bytes: Callable[[str], int | None]


LIMIT_KINDS: Final = (
    LimitKind("gateway.envoyproxy.io/v1alpha1", "backendtrafficpolicies", ("requestBuffer", "limit"), quantity_bytes),
    LimitKind("gateway.nginx.org/v1alpha1", "clientsettingspolicies", ("body", "maxSize"), _nginx_size),
)
"""Policies of Envoy Gateway and NGINX Gateway Fabric, which answer a larger body 413."""


def _limits(gateway: GatewayFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    wanted = dep.spec.routing.media.max_request_bytes
    for kind, policies in gateway.limits.items():
        if isinstance(policies, Unread):
            yield unread(kind.plural, policies)
            continue
        for policy in policies:
            text = _limit(policy, kind)
            limit = kind.bytes(text) if text else None
            if limit is not None and limit < quantity_bytes(wanted) and _targets(policy, dep):
                name = f"{policy['metadata']['namespace']}/{policy['metadata']['name']}"
                yield problem(
                    f"{kind.plural} {name} limits bodies to {text}, and routing.media.maxRequestBytes is {wanted}: the "
                    "gateway refuses requests that the deployment would take",
                    f"Raise {'.'.join(kind.field)} there, or lower routing.media.maxRequestBytes.",
                )


def _limit(policy: Object, kind: LimitKind) -> str:
    section, field = kind.field
    value = (policy["spec"].get(section) or {}).get(field)
    return "" if value is None else str(value)


def _targets(policy: Object, dep: MMRouterDeployment) -> bool:
    """Whether a policy is for the deployment's route or one of its Gateways. A policy is where its target is."""
    spec, namespace = policy["spec"], policy["metadata"]["namespace"]
    refs: list[dict[str, Any]] = [
        *(spec.get("targetRefs") or []),
        *([spec["targetRef"]] if "targetRef" in spec else []),
    ]
    gateways = dep.spec.frontend.gateway.parent_refs if dep.spec.frontend.gateway is not None else []
    names = {("Gateway", ref.namespace or dep.metadata.namespace, ref.name) for ref in gateways}
    names.add(("HTTPRoute", dep.metadata.namespace, dep.metadata.name))
    return any((ref.get("kind"), namespace, ref.get("name")) in names for ref in refs)
