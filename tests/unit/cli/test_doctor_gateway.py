"""Doctor's checks of the way from a gateway to a deployment."""

from collections.abc import Iterable
from typing import Any

import pytest
from unit.cli import healthy_cluster as d

from mmrouter_cli.doctor.check_cluster import api_check
from mmrouter_cli.doctor.check_gateway import LIMIT_KINDS, gateway_check, picker_check
from mmrouter_cli.doctor.findings import Finding, GatewayFacts
from mmrouter_cli.doctor.picker_health import PickerHealth
from mmrouter_cli.status.control_api import NOT_RUNNING, Unread
from mmrouter_lib.api import SpecError

DENIED = Unread("GET /x: forbidden")


def behind(found: GatewayFacts, asked: int | None = 0, **frontend: Any) -> list[Finding]:
    """``asked``: how many requests gateways asked a picker about, ``None`` where no frontend is heard."""
    facts = d.deployed(d.resource(frontend={"mode": "endpointPicker", **frontend}), gateway=found)
    heard = None if asked is None else d.heard(d.state(gateway_requests=asked))
    assert not isinstance(facts.dep, SpecError)
    return list(gateway_check(facts, facts.dep, heard))


def asked_for_health(*health: PickerHealth | Unread, tls: bool | None = None) -> list[Finding]:
    named = tuple((f"f-{number}", one) for number, one in enumerate(health))
    return list(picker_check(d.heard()._replace(pickers=named), tls))


def of_spec(**sections: Any) -> Any:
    return d.deployed(d.resource(**sections)).dep


def opening(*ports: Any, **labels: str) -> dict[str, Any]:
    selector = {"matchLabels": {"mmrouter.io/deployment": "vl", **labels}}
    ingress = [{"from": [{"namespaceSelector": {}}], "ports": list(ports)}]
    return {"metadata": {"name": "from-gateway"}, "spec": {"podSelector": selector, "ingress": ingress}}


def of_operator(policy: dict[str, Any]) -> dict[str, Any]:
    labels = {"app.kubernetes.io/managed-by": "mmrouter-operator"}
    return {**policy, "metadata": {"name": "vl-frontend", "labels": labels}}


def limiting(number: int, spec: dict[str, Any], namespace: str = "home") -> GatewayFacts:
    policy = {"metadata": {"name": "small", "namespace": namespace}, "spec": spec}
    return GatewayFacts(limits={LIMIT_KINDS[number]: [policy]})


REPORT = {"parentRef": {"name": "public"}, "conditions": [{"type": "Accepted", "status": "True"}]}
POOL = {"kind": "InferencePool", "metadata": {"name": "vl", "namespace": "home"}, "status": {"parents": [REPORT]}}
BOTH = [opening({"port": 9002}, {"port": 8000, "endPort": 8001})]
ONE = [opening({"port": 9002}, **{"mmrouter.io/role": "frontend"}), of_operator(opening({"port": 8000}))]
ROUTE = {"kind": "HTTPRoute", "name": "vl"}
INFRA = {"parentRefs": [{"name": "public", "namespace": "infra"}]}
PUBLIC = {"kind": "Gateway", "name": "public"}
NOT_SERVING = "reports NOT_SERVING for envoy.service.ext_proc.v3.ExternalProcessor"
CASES: dict[str, Iterable[Finding]] = {
    "ok: picker of f-0 serves gateways by TLS | ok: picker of f-1 serves gateways by plain HTTP/2": asked_for_health(
        PickerHealth(True), PickerHealth(False)
    ),
    "problem: f-0 refuses connections -> See the log": asked_for_health(PickerHealth(None, "refuses connections")),
    "problem: f-0 serves plain HTTP/2, and by frontend.pickerTls it should serve TLS -> see pods": asked_for_health(
        PickerHealth(False), tls=True
    ),
    "problem: f-0 reports NOT_SERVING for envoy -> Ready": asked_for_health(PickerHealth(True, NOT_SERVING), tls=True),
    "warning: health of the picker of f-1 cannot be read: GET /x": asked_for_health(Unread(NOT_RUNNING), DENIED),
    "ok: gateways have asked the pickers 3 times": behind(GatewayFacts(), asked=3),
    "warning: since it started; port 9002 expects TLS -> Send a request": behind(GatewayFacts(), mode="frontendPicker"),
    "problem: opens port 9002 of the frontends and port 8000 of the workers -> docs/gateway.md": behind(GatewayFacts()),
    "problem: no NetworkPolicy opens port 8000 of the workers, so": behind(GatewayFacts(policies=ONE), asked=None),
    "warning: since it started; port 9002 expects TLS": behind(GatewayFacts(policies=BOTH)),
    "warning: since it started; port 9002 expects plain HTTP/2": behind(GatewayFacts(policies=BOTH), pickerTls="none"),
    "warning: network policies cannot be read | warning: no gateway has asked": behind(GatewayFacts(policies=DENIED)),
    "warning: the InferencePool and the HTTPRoute cannot be read | ok: ": behind(GatewayFacts(DENIED), asked=1),
    "problem: no gateway has accepted InferencePool vl -> Gateway exists | ok: ": behind(GatewayFacts([]), asked=1),
    "ok: Gateway home/public accepts InferencePool vl | ok: ": behind(GatewayFacts([POOL]), asked=1),
    "ok: asked the pickers 1 times | problem: small limits bodies to 1m -> Raise body.maxSize": behind(
        limiting(1, {"targetRef": ROUTE, "body": {"maxSize": "1m"}}), asked=1
    ),
    "ok: 1 times | problem: infra/small limits bodies to 8Mi -> Raise requestBuffer.limit": behind(
        limiting(0, {"targetRefs": [PUBLIC], "requestBuffer": {"limit": "8Mi"}}, "infra"), asked=1, gateway=INFRA
    ),
    "ok: asked the pickers 2 times": behind(
        limiting(0, {"targetRefs": [PUBLIC], "requestBuffer": {"limit": "8Mi"}}), asked=2, gateway=INFRA
    ),
    "ok: asked the pickers 4 times": behind(limiting(1, {"targetRef": ROUTE, "body": {"maxSize": "0"}}), asked=4),
    "ok: asked the pickers 5 times": behind(limiting(1, {"targetRef": ROUTE, "body": {"maxSize": "64m"}}), asked=5),
    "problem: frontend.mode: endpointPicker needs inference.networking.k8s.io/v1": api_check(
        d.cluster(), of_spec(frontend={"mode": "endpointPicker"})
    ),
    "problem: frontend.gateway needs gateway.networking.k8s.io/v1": api_check(
        d.cluster(), of_spec(frontend={"gateway": INFRA})
    ),
}
"""As in ``test_doctor``: each finding, in order -> what the check finds."""


@pytest.mark.parametrize("case", CASES)
def test_each_trouble_on_the_way_is_a_finding_that_names_it(case: str) -> None:
    d.require(CASES[case], case)
