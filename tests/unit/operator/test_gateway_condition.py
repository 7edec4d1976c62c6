"""The condition ``GatewayAccepted``: what gateways report on the pool and the route of a deployment."""

import dataclasses
from typing import Any

import pytest
from unit.operator.simulated_world import World, deployment, whole
from unit.operator.test_status import PARENT, PICKED, conditions, judged, message

from mmrouter_operator.model.kinds import GATEWAY_API, INFERENCE_POOL_API, Capabilities
from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.model.views import child_view

GATEWAYS = Capabilities(frozenset({GATEWAY_API, INFERENCE_POOL_API}))
YES = {"type": "Accepted", "status": "True", "reason": "Accepted"}
NO = {"type": "Accepted", "status": "False", "reason": "NotAllowedByListeners", "message": "not this namespace"}
DANGLING = {"type": "ResolvedRefs", "status": "False", "reason": "BackendNotFound", "message": "no such pool"}


def reported(*conditions: dict[str, Any], gateway: str = "public", kind: str = "HTTPRoute") -> dict[str, Any]:
    """A pool or a route as a gateway reports on it; without conditions, as none does."""
    parent = {"parentRef": {"namespace": "infra", "name": gateway}, "conditions": list(conditions)}
    metadata = {"name": "vl", "namespace": "home", "uid": "9", "resourceVersion": "1", "generation": 2}
    return {"kind": kind, "metadata": metadata, "status": {"parents": [parent] if conditions else []}}


def behind(mode: str, pool: list[dict[str, Any]], route: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status of a deployment on whose pool and route a gateway reports these conditions."""
    spec = {**whole(), **PICKED, "frontend": {"mode": mode, "gateway": PARENT}}
    objects = (reported(*pool, kind="InferencePool"), reported(*route))

    def seen(snapshot: Snapshot) -> Snapshot:
        views = {(obj["kind"], "vl"): child_view(obj) for obj in objects}
        return dataclasses.replace(snapshot, capabilities=GATEWAYS, children={**snapshot.children, **views})

    return judged(World(deployment(spec)), seen)


@pytest.mark.parametrize("mode", ["endpointPicker", "frontendPicker"])
@pytest.mark.parametrize(
    ("pool", "route", "reason", "words"),
    [
        ([], [], "NotReported", "no gateway has accepted InferencePool vl"),
        ([YES | {"status": "Unknown"}], [YES], "NotReported", "no gateway has accepted InferencePool vl"),
        ([YES], [], "NotReported", "Gateway infra/public has not accepted HTTPRoute vl"),
        ([YES], [YES | {"observedGeneration": 1}], "NotReported", "has not accepted HTTPRoute vl"),
        (
            [YES],
            [NO],
            "NotAccepted",
            "infra/public refuses HTTPRoute vl: Accepted is False, NotAllowedByListeners: not",
        ),
        ([YES], [YES, DANGLING], "NotAccepted", "ResolvedRefs is False, BackendNotFound: no such pool"),
        ([YES], [YES | {"observedGeneration": 2}], "Accepted", "Gateway infra/public accepts HTTPRoute vl"),
    ],
)
def test_what_gateways_report_is_a_condition(
    pool: list[dict[str, Any]], route: list[dict[str, Any]], reason: str, words: str, mode: str
) -> None:
    status = behind(mode, pool, route)
    assert conditions(status)["GatewayAccepted"][1] == reason
    assert words in message(status, "GatewayAccepted")


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        ("endpointPicker", "chooses the worker of each request"),
        ("frontendPicker", "chooses the frontend of each request"),
        ("frontend", ""),
    ],
)
def test_an_accepted_deployment_says_what_its_picker_chooses(mode: str, words: str) -> None:
    text = message(behind(mode, [YES], [YES]), "GatewayAccepted")
    assert words in text
    assert ("picker" in text) is bool(words)
