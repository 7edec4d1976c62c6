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
from mmrouter_cli.status.frontend_state import Unread

TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
NVIDIA_TAINT = {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
FRONTENDS = (d.pod("f-0", ""), d.pod("f-1", ""))


def judged(
    nodes: list[Any], pods: tuple[Any, ...] = FRONTENDS, others: tuple[Any, ...] = (), **pool: Any
) -> list[Finding]:
    """Findings of one pool of two replicas; ``others`` are pods of the cluster beside ``pods``."""
    shape = {"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}} | pool
    facts = d.deployed(d.resource(pools=[shape]), pods=pods)
    whole = d.cluster(nodes=tuple(nodes), pods=(*pods, *others))
    return [item for item in capacity_check(whole, facts, facts.dep) if "pool worker" in item.seen]


def the_problem(nodes: list[Any], **more: Any) -> Finding:
    return d.the(judged(nodes, **more), "problem")


def holding(name: str, on: str, **amounts: str) -> Any:
    pod = d.pod(name, "other", on)
    named = {{"gpus": "nvidia.com/gpu"}.get(key, key): value for key, value in amounts.items()}
    pod["spec"]["containers"][0]["resources"] = {"limits": named}
    return pod


def test_pods_that_have_a_node_are_ok() -> None:
    (finding,) = judged([d.gpu_node("a"), d.gpu_node("b")], pods=(*FRONTENDS, d.pod("w-0"), d.pod("w-1")))
    assert finding.level == "ok"
    assert "2 of 2 pods have a node" in finding.seen


def test_room_for_what_is_missing_is_ok() -> None:
    assert "room for the other 2" in d.the(judged([d.gpu_node("a")]), "ok").seen


def test_a_label_that_no_node_has_is_named_with_every_alternative() -> None:
    finding = the_problem([d.node("plain")])
    assert "nvidia.com/gpu.present=true or " in finding.seen
    assert "device plugin" in finding.do


def test_a_node_with_the_devices_and_no_label_is_shown_how_to_get_it() -> None:
    finding = the_problem([d.node("plain"), d.node("unlabelled", gpus=4)])
    assert "unlabelled offers nvidia.com/gpu" in finding.seen
    assert finding.do.endswith("kubectl label node unlabelled nvidia.com/gpu.present=true")


def test_a_label_without_devices_means_that_the_device_plugin_does_not_run() -> None:
    finding = the_problem([d.node("a", {"nvidia.com/gpu.present": "true"})])
    assert "1 nvidia.com/gpu, which a does not offer" in finding.seen
    assert "device plugin for nvidia.com/gpu" in finding.do


def test_a_taint_is_named_with_the_toleration_that_takes_it() -> None:
    finding = the_problem([d.gpu_node("a", taints=[TAINT])])
    assert "team=vision:NoSchedule" in finding.seen
    assert finding.do == "Add to spec.pools[worker].tolerations: {key: team, operator: Exists, effect: NoSchedule}"
    allowed = [{"key": "team", "operator": "Exists"}]
    assert d.levels(judged([d.gpu_node("a", taints=[TAINT])], tolerations=allowed)) == ["ok"]


def test_the_taint_that_device_nodes_usually_have_is_tolerated() -> None:
    assert d.levels(judged([d.gpu_node("a", taints=[NVIDIA_TAINT])])) == ["ok"]


@pytest.mark.parametrize(
    ("how", "says", "do"),
    [
        ({"cordoned": True}, "a is cordoned", "kubectl uncordon a"),
        ({"ready": False}, "a is not Ready", "describe node a"),
    ],
)
def test_a_node_that_takes_nothing_is_named(how: dict[str, bool], says: str, do: str) -> None:
    finding = the_problem([d.gpu_node("a", **how), d.node("plain")])
    assert says in finding.seen
    assert do in finding.do


def test_what_other_pods_hold_is_not_free() -> None:
    finding = the_problem([d.gpu_node("a", gpus=8)], others=(holding("x", "a", gpus="7"),))
    assert "0 of 2 pods have a node; 1 find none: a pod requests 1 nvidia.com/gpu, free is a: 0 nvidia.com/gpu" in (
        finding.seen
    )


def test_a_pod_that_ended_holds_nothing() -> None:
    ended = holding("x", "a", gpus="8")
    ended["status"]["phase"] = "Succeeded"
    assert d.levels(judged([d.gpu_node("a")], others=(ended,))) == ["ok"]


def test_memory_counts_like_devices() -> None:
    finding = the_problem([d.gpu_node("a", memory="16Gi")], resources={"requests": {"memory": "24Gi"}})
    assert "24Gi memory" in finding.seen
    assert "a: 16Gi memory" in finding.seen


def test_two_pools_do_not_get_the_same_device() -> None:
    pools = [
        {"name": name, "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}} for name in ("one", "two")
    ]
    facts = d.deployed(d.resource(pools=pools), pods=FRONTENDS)
    found = list(capacity_check(d.cluster(nodes=(d.gpu_node("a", gpus=3),)), facts, facts.dep))
    assert "pool one" in d.the(found[:1], "ok").seen
    assert "pool two: 0 of 2 pods have a node; 1 find none" in d.the(found, "problem").seen


def test_a_claim_asks_for_no_label_and_no_resource() -> None:
    claims = {"kind": "nvidia", "claims": [{"name": "gpu", "resourceClaimTemplateName": "t"}]}
    assert d.levels(judged([d.node("plain")], accelerator=claims)) == ["ok"]


def test_no_room_for_the_extra_pod_of_a_rollout_is_a_warning() -> None:
    pods = (*FRONTENDS, holding("w-0", "a", gpus="1"), holding("w-1", "a", gpus="1"))
    for pod in pods[2:]:
        pod["metadata"]["labels"]["mmrouter.io/pool"] = "worker"
    assert "extra pod of a rollout" in d.the(judged([d.gpu_node("a", gpus=2)], pods=pods), "warning").seen
    calm = {"updates": {"maxSurge": 0, "maxUnavailable": 1}}
    assert d.levels(judged([d.gpu_node("a", gpus=2)], pods=pods, **calm)) == ["ok"]


def test_an_autoscaled_pool_wants_what_its_autoscaler_wants() -> None:
    shape = {"name": "worker", "role": "worker", "replicas": 9, "accelerator": {"kind": "nvidia"}}
    made = d.resource(pools=[{**shape, "autoscaling": {"maxReplicas": 9}}])
    made["status"]["pools"] = [{"name": "worker", "role": "worker", "desired": 2}]
    facts = d.deployed(made, pods=FRONTENDS)
    found = list(capacity_check(d.cluster(nodes=(d.gpu_node("a", gpus=2),)), facts, facts.dep))
    assert "pool worker: 0 of 2 pods have a node, there is room for the other 2" in [item.seen for item in found]


def test_a_cluster_without_nodes_is_a_problem() -> None:
    assert "has no nodes" in the_problem([]).seen


def test_pods_of_others_that_cannot_be_read_are_said_not_to_be_counted() -> None:
    facts = d.deployed()
    found = list(capacity_check(d.cluster(pods=Unread("forbidden")), facts, facts.dep))
    assert "are not counted" in found[0].seen


# -- the scheduler's rules -----------------------------------------------------------------------------------------


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


def test_a_limit_without_a_request_is_the_request() -> None:
    assert requests({"containers": [{"resources": {"limits": {"x/y": "2"}}}]})["x/y"] == 2


@pytest.mark.parametrize(
    ("operator", "values", "taken"),
    [
        ("In", ["4", "5"], True),
        ("In", ["5"], False),
        ("NotIn", ["4"], False),
        ("NotIn", ["5"], True),
        ("Exists", [], True),
        ("DoesNotExist", [], False),
        ("Gt", ["3"], True),
        ("Gt", ["4"], False),
        ("Lt", ["5"], True),
    ],
)
def test_node_affinity_is_that_of_kubernetes(operator: str, values: list[str], taken: bool) -> None:
    terms = [{"matchExpressions": [{"key": "size", "operator": operator, "values": values}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    (node,) = nodes_of([d.node("a", {"size": "4"})], [])
    assert selects({"affinity": {"nodeAffinity": required}}, node) is taken


@pytest.mark.parametrize(
    ("toleration", "taken"),
    [
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team", "value": "other"}, False),
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_are_those_of_kubernetes(toleration: dict[str, str], taken: bool) -> None:
    (node,) = nodes_of([d.node("a", taints=[TAINT])], [])
    assert (not barring({"tolerations": [toleration]}, node)) is taken


def test_a_preferred_taint_does_not_bar_pods() -> None:
    (node,) = nodes_of([d.node("a", taints=[{**TAINT, "effect": "PreferNoSchedule"}])], [])
    assert barring({}, node) == []


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
