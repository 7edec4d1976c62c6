"""Who a pod is, from what the cluster's API says of it."""

from copy import deepcopy

import pytest

from mmrouter_router.fleet.membership import Peer
from mmrouter_router.fleet.pods import membership_of, parse_pod
from mmrouter_router.fleet.workers import Member

POD = {
    "metadata": {
        "uid": "u1",
        "name": "demo-worker-1",
        "labels": {"mmrouter.io/deployment": "demo", "mmrouter.io/pool": "worker", "mmrouter.io/role": "worker"},
    },
    "spec": {"nodeName": "n1"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "initContainerStatuses": [{"name": "sidecar", "started": True, "ready": True}],
        "containerStatuses": [{"name": "engine", "started": False, "ready": False}],
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}],
    },
}


def changed(**places):
    """The pod with values at dotted places; ``None`` takes the field away."""
    pod = deepcopy(POD)
    for place, value in places.items():
        *parents, last = place.split("__")
        at = pod
        for parent in parents:
            at = at[parent]
        if value is None:
            at.pop(last)
        else:
            at[last] = value
    return pod


def labelled(**labels):
    names = {"mmrouter.io/deployment": "demo", **{f"mmrouter.io/{name}": value for name, value in labels.items()}}
    return changed(metadata__labels=names)


def test_engine_pod_is_a_member():
    assert parse_pod(POD) == Member(
        "u1", "demo-worker-1", "10.0.0.7", "worker", "worker", "n1", ready=True, draining=False
    )


def test_labels_determine_compatibility():
    found = parse_pod(labelled(role="prefill", pool="p", compatibility="ab12"))
    assert isinstance(found, Member)
    assert found.compatibility == "ab12"
    other = parse_pod(labelled(role="prefill", pool="p", compatibility="ab12", **{"kv-layout": "cd34"}))
    assert isinstance(other, Member)
    assert other.compatibility == "ab12-cd34"
    assert parse_pod(POD).compatibility == ""


def test_started_sidecar_makes_a_pod_ready():
    assert parse_pod(POD).ready
    starting = [{"name": "sidecar", "started": False}]
    assert not parse_pod(changed(status__initContainerStatuses=starting)).ready
    assert not parse_pod(changed(status__initContainerStatuses=None)).ready


def test_ready_condition_is_ignored():
    conditions = [{"type": "Ready", "status": "True"}]
    pod = changed(status__conditions=conditions, status__initContainerStatuses=None)
    assert not parse_pod(pod).ready


def gated(*true, gates=("mmrouter.io/routable", "mmrouter.io/verified")):
    named = [{"conditionType": gate} for gate in gates]
    conditions = [{"type": gate, "status": "True" if gate in true else "False"} for gate in gates]
    return changed(spec__readinessGates=named, status__conditions=conditions)


def test_pod_is_admitted_once_both_gates_are_open():
    routable, verified = gates = "mmrouter.io/routable", "mmrouter.io/verified"
    assert not parse_pod(gated()).admitted
    assert not parse_pod(gated(routable)).admitted
    assert not parse_pod(gated(verified)).admitted
    assert parse_pod(gated(*gates)).admitted
    unwritten = gated(*gates)
    unwritten["status"]["conditions"] = []
    assert not parse_pod(unwritten).admitted


def test_pod_without_own_gates_is_admitted():
    assert parse_pod(POD).admitted
    assert parse_pod(gated(gates=("example.com/warm",))).admitted


def test_renderer_is_ready_with_its_containers():
    pod = labelled(pool="render", role="renderer")
    assert not parse_pod(pod).ready
    pod["status"]["conditions"] = [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert parse_pod(pod).ready


def test_deleted_pod_drains():
    member = parse_pod(changed(metadata__deletionTimestamp="2026-01-01T00:00:00Z"))
    assert member.draining


@pytest.mark.parametrize(
    "places",
    [{"status__podIP": None}, {"status__podIP": ""}, {"status__phase": "Failed"}, {"status__phase": "Succeeded"}],
)
def test_pod_without_address_or_ended_is_ignored(places):
    assert parse_pod(changed(**places)) is None


@pytest.mark.parametrize("role", ["worker", "prefill", "decode", "encoder", "renderer"])
def test_every_role_is_parsed(role):
    assert parse_pod(labelled(pool="p", role=role)).role == role


@pytest.mark.parametrize("labels", [{"pool": "p", "role": "unheard-of"}, {"role": "worker"}, {"pool": "p"}, {}])
def test_pod_of_no_pool_or_unknown_role_is_ignored(labels):
    assert parse_pod(labelled(**labels)) is None


@pytest.mark.parametrize("pod", [{}, {"metadata": None, "status": None}, {"metadata": {"uid": "u"}, "status": {}}])
def test_incomplete_object_is_ignored(pod):
    assert parse_pod(pod) is None


def test_membership_excludes_the_router_itself():
    mine, other = Peer("f1", "demo-frontend-a", "10.0.0.1"), Peer("f2", "demo-frontend-b", "10.0.0.2")
    found = membership_of([other, parse_pod(POD), mine], "f1", leaving=False)
    assert (found.peers, found.members, found.leaving) == ((other,), (parse_pod(POD),), False)


def test_membership_does_not_depend_on_order():
    second = parse_pod(changed(metadata__uid="u2", metadata__name="demo-worker-0"))
    everybody = [parse_pod(POD), second, Peer("f2", "b", "10.0.0.2"), Peer("f3", "a", "10.0.0.3")]
    assert membership_of(everybody, "f1", leaving=False) == membership_of(everybody[::-1], "f1", leaving=False)
