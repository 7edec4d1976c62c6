"""Doctor's view of nodes: the first thing that keeps a pool's pods from every node is named."""

import copy
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.cli import healthy_cluster as d

from mmrouter_cli.doctor.check_capacity import capacity_check
from mmrouter_cli.doctor.findings import Finding
from mmrouter_cli.doctor.node_fit import barring, lacking, nodes_of, place, requests, selects
from mmrouter_cli.status.control_api import Unread

TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
NVIDIA_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
FRONTENDS = (d.pod("f-0", ""), d.pod("f-1", ""))


def judged(
    nodes: list[Any], pods: tuple[Any, ...] = FRONTENDS, others: tuple[Any, ...] = (), **pool: Any
) -> list[Finding]:
    """Findings of one pool of two replicas; ``others`` are pods of the cluster beside ``pods``."""
    facts = d.deployed(d.resource(pools=[d.pool(**pool)]), pods=pods)
    whole = d.cluster(nodes=tuple(nodes), pods=(*pods, *others))
    return [item for item in capacity_check(whole, facts, facts.dep) if "pool worker" in item.seen]


def holding(name: str, gpus: str, pool: str = "other", **status: Any) -> Any:
    """A pod on node a."""
    pod = d.pod(name, pool, "a", **status)
    pod["spec"]["containers"][0]["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    return pod


PLAIN, TAINTED = d.node("plain"), d.gpu_node("a", taints=[TAINT])
BUSY = (*FRONTENDS, holding("w-0", "1", "worker"), holding("w-1", "1", "worker"))
TOLERATED = [{"key": "team", "operator": "Exists"}]
CALM = {"maxSurge": 0, "maxUnavailable": 1}
CLAIMS = {"kind": "nvidia", "claims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}
FOUND: dict[str, list[Finding]] = {
    "ok: 2 of 2 pods have a node": judged(
        [d.gpu_node("a"), d.gpu_node("b")], pods=(*FRONTENDS, d.pod("w-0"), d.pod("w-1"))
    ),
    "ok: room for the other 2": judged([d.gpu_node("a")]),
    "problem: no node has the labels nvidia.com/gpu.present=true or -> device plugin": judged([PLAIN]),
    "problem: unlabelled offers nvidia.com/gpu -> kubectl label node unlabelled nvidia.com/gpu.present=true": judged(
        [PLAIN, d.node("unlabelled", gpus=4)]
    ),
    "problem: 1 nvidia.com/gpu, which a does not offer -> device plugin for nvidia.com/gpu": judged(
        [d.node("a", {"nvidia.com/gpu.present": "true"})]
    ),
    "problem: team=vision:NoSchedule -> Add to spec.pools[worker].tolerations: {key: team, operator: Exists, effect: "
    "NoSchedule}": judged([TAINTED]),
    "ok: , there is room for the other 2": judged([TAINTED], tolerations=TOLERATED),
    "ok: 0 of 2 pods have a node": judged([d.gpu_node("a", taints=[NVIDIA_TAINT])]),
    "problem: a is cordoned -> kubectl uncordon a": judged([d.gpu_node("a", cordoned=True), PLAIN]),
    "problem: a is not Ready -> describe node a": judged([d.gpu_node("a", ready=False), PLAIN]),
    "problem: 0 of 2 pods have a node; 1 find none: a pod requests 1 nvidia.com/gpu, free is a: 0 nvidia": judged(
        [d.gpu_node("a", gpus=8)], others=(holding("x", "7"),)
    ),
    "ok: there is room": judged([d.gpu_node("a")], others=(holding("ended", "8", phase="Succeeded"),)),
    "problem: a pod requests 24Gi memory, free is a: 16Gi memory": judged(
        [d.gpu_node("a", memory="16Gi")], resources={"requests": {"memory": "24Gi"}}
    ),
    "ok: pods have a node, there is room": judged([PLAIN], accelerator=CLAIMS),
    "warning: no node has room for the extra pod of a rollout": judged([d.gpu_node("a", gpus=2)], pods=BUSY),
    "ok: 2 of 2 pods have a node, on a": judged([d.gpu_node("a", gpus=2)], pods=BUSY, updates=CALM),
    "problem: has no nodes": judged([]),
}


@pytest.mark.parametrize("case", FOUND)
def test_the_first_thing_that_keeps_pods_from_every_node_is_named_with_what_to_do(case: str) -> None:
    d.require(FOUND[case], case)


def test_two_pools_do_not_get_the_same_device() -> None:
    pools = [d.pool(name=name) for name in ("one", "two")]
    facts = d.deployed(d.resource(pools=pools), pods=FRONTENDS)
    found = list(capacity_check(d.cluster(nodes=(d.gpu_node("a", gpus=3),)), facts, facts.dep))
    assert "pool one" in d.the(found[:1], "ok").seen
    assert "pool two: 0 of 2 pods have a node; 1 find none" in d.the(found, "problem").seen


def test_an_autoscaled_pool_wants_what_its_autoscaler_wants() -> None:
    made = d.resource(pools=[d.pool(replicas=9, autoscaling={"maxReplicas": 9})])
    made["status"]["pools"] = [{"name": "worker", "role": "worker", "desired": 2}]
    facts = d.deployed(made, pods=FRONTENDS)
    found = list(capacity_check(d.cluster(nodes=(d.gpu_node("a", gpus=2),)), facts, facts.dep))
    assert "pool worker: 0 of 2 pods have a node, there is room for the other 2" in [item.seen for item in found]


def test_pods_of_others_that_cannot_be_read_are_said_not_to_be_counted() -> None:
    facts = d.deployed()
    found = list(capacity_check(d.cluster(pods=Unread("forbidden")), facts, facts.dep))
    assert "are not counted" in found[0].seen


def container(cpu: str, **more: Any) -> dict[str, Any]:
    return {"name": "c", "resources": {"requests": {"cpu": cpu}}, **more}


def test_requests_of_sidecars_add_to_containers_and_init_containers_replace_them() -> None:
    pod = {
        "initContainers": [container("3"), container("1", restartPolicy="Always"), container("5")],
        "containers": [container("2"), container("500m")],
        "overhead": {"cpu": "250m"},
    }
    # The last init container runs beside the sidecar: 5 + 1, which is more than 2.5 + 1.
    assert requests(pod)["cpu"] == Decimal("6.25")
    pod["initContainers"].pop()
    assert requests(pod)["cpu"] == Decimal("3.75")
    limited = {"containers": [{"resources": {"limits": {"x/y": "2"}}}]}
    assert requests(limited)["x/y"] == 2, "a limit without a request is the request"


@pytest.mark.parametrize(
    ("expression", "taken"),
    [
        *((text, True) for text in ("In 4 5", "NotIn 5", "Exists", "Gt 3", "Lt 5")),
        *((text, False) for text in ("In 5", "NotIn 4", "DoesNotExist", "Gt 4")),
    ],
)
def test_node_affinity_is_that_of_kubernetes(expression: str, taken: bool) -> None:
    operator, *values = expression.split()
    terms = [{"matchExpressions": [{"key": "size", "operator": operator, "values": values}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    (node,) = nodes_of([d.node("a", {"size": "4"})], [])
    assert selects({"affinity": {"nodeAffinity": required}}, node) is taken


@pytest.mark.parametrize(
    ("toleration", "effect", "taken"),
    [
        ({"key": "team", "value": "vision"}, "NoSchedule", True),
        ({"key": "team", "value": "other"}, "NoSchedule", False),
        ({"operator": "Exists"}, "NoSchedule", True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, "NoSchedule", False),
        ({"key": "other", "operator": "Exists"}, "NoSchedule", False),
        ({"key": "other", "operator": "Exists"}, "PreferNoSchedule", True),
    ],
)
def test_tolerations_are_those_of_kubernetes(toleration: dict[str, str], effect: str, taken: bool) -> None:
    (node,) = nodes_of([d.node("a", taints=[TAINT | {"effect": effect}])], [])
    assert (not barring({"tolerations": [toleration]}, node)) is taken


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(1, 4), st.integers(0, 20))
def test_as_many_pods_fit_as_devices_are_left_and_never_more(free: list[int], each: int, count: int) -> None:
    nodes = nodes_of([d.gpu_node(f"n{number}", gpus=gpus) for number, gpus in enumerate(free)], [])
    before = copy.deepcopy(nodes)
    asked = {"nvidia.com/gpu": Decimal(each)}
    placed, after = place(asked, count, nodes)
    assert placed == min(count, sum(gpus // each for gpus in free))
    assert nodes == before
    assert all(amount >= 0 for node in after for amount in node.free.values())
    taken = sum(a.free["nvidia.com/gpu"] - b.free["nvidia.com/gpu"] for a, b in zip(nodes, after, strict=True))
    assert taken == placed * each
    if placed < count:
        assert all(lacking(asked, node.free) for node in after)
