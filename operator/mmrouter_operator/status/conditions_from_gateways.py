"""The condition that is judged by what gateways report on the InferencePool and the HTTPRoute. Pure."""

from collections.abc import Mapping
from typing import Final, NamedTuple

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import INFERENCE_POOL_API
from mmrouter_operator.model.snapshot import ChildView, GatewayChildView, Snapshot
from mmrouter_operator.render.httproute import route_apis
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition

PICKED: Final = {
    "endpointPicker": "a picker chooses the worker of each request",
    "frontendPicker": "a picker chooses the frontend of each request, which chooses its engines",
}


class GatewayReports(NamedTuple):
    """What gateways report on a deployment's objects, in sentences."""

    refused: tuple[str, ...]
    missing: tuple[str, ...]
    """Reports that are still expected."""
    accepted: tuple[str, ...]


def gateway_accepted(dep: MMRouterDeployment, snapshot: Snapshot) -> Condition | None:
    """Return whether gateways accept the deployment's objects; ``None`` if it has none for them."""
    if not (apis := gateway_apis(dep)):
        return None
    if lacking := [api for api in apis if not snapshot.capabilities.serves(api)]:
        message = f"the cluster does not serve {' and '.join(lacking)}, so no gateway can route to the deployment"
        return condition(c.GATEWAY, "GatewayApiUnavailable", message)
    reports = gateway_reports(dep, snapshot.children)
    reason = "NotAccepted" if reports.refused else "NotReported" if reports.missing else "Accepted"
    chosen = (PICKED[dep.spec.frontend.mode],) if reason == "Accepted" and dep.spec.frontend.has_picker else ()
    return condition(c.GATEWAY, reason, "; ".join(sentence for part in (*reports, chosen) for sentence in part))


def gateway_apis(dep: MMRouterDeployment) -> tuple[str, ...]:
    """Return the APIs that a gateway's objects of the deployment need; empty if there are none."""
    frontend = dep.spec.frontend
    if frontend.gateway is not None:
        return route_apis(dep)
    return (INFERENCE_POOL_API,) if frontend.has_picker else ()


def gateway_reports(dep: MMRouterDeployment, children: Mapping[tuple[str, str], ChildView]) -> GatewayReports:
    """Return what gateways report on the pool, and on the route, where every Gateway that it names should."""
    name, namespace, frontend = dep.metadata.name, dep.metadata.namespace, dep.spec.frontend
    expected: dict[str, set[str]] = {}
    if frontend.has_picker:
        expected["InferencePool"] = set()
    if frontend.gateway is not None:
        expected["HTTPRoute"] = {
            "/".join(filter(None, (ref.namespace or namespace, ref.name, ref.section_name)))
            for ref in frontend.gateway.parent_refs
        }
    refused, missing, accepted = list[str](), list[str](), list[str]()
    for kind, gateways in expected.items():
        view = children.get((kind, name))
        reports = view.reports if isinstance(view, GatewayChildView) else ()
        denying = {report.gateway: report.refused for report in reports if report.refused}
        taking = {report.gateway for report in reports if report.accepted} - denying.keys()
        refused += [f"Gateway {each} refuses {kind} {name}: {why}" for each, why in denying.items()]
        accepted += [f"Gateway {each} accepts {kind} {name}" for each in sorted(taking)]
        missing += [
            f"Gateway {each} has not accepted {kind} {name}" for each in sorted(gateways - taking - denying.keys())
        ]
        if not (gateways or taking or denying):
            missing.append(f"no gateway has accepted {kind} {name}")
    return GatewayReports(tuple(refused), tuple(missing), tuple(accepted))
