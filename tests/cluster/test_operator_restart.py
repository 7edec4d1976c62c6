"""The operator comes and goes: what stays, and what happens without it."""

from cluster.controlplane import ControlPlane
from cluster.deployments import SECONDS, Deployed, named
from cluster.hollow_kubelet import Hollow
from cluster.operators import USER, idle, operator
from waiting import wait_for


def test_deleting_collects_everything_with_the_operator_down(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd):
        deployed.apply(named("doomed"))
        deployed.settled("doomed")
    assert deployed.children("doomed")
    crd.request("DELETE", deployed.path("mmrouterdeployments", "doomed")).raise_for_status()
    wait_for(lambda: not deployed.children("doomed"), 60, "all children are collected")
    assert deployed.get("mmrouterdeployments", "doomed") is None


def test_a_new_operator_finds_everything_in_order_and_changes_nothing(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd, "first"):
        deployed.apply(named("still"))
        deployed.settled("still")
        idle(crd, USER, 1.0, SECONDS)  # the pods are up, and the status says so
    before = {place: item["metadata"].get("generation") for place, item in deployed.children("still").items()}
    uids = {place: item["metadata"]["uid"] for place, item in deployed.children("still").items()}
    with operator(crd, "second") as second:
        wait_for(lambda: 'result="success"' in second.metrics(), SECONDS, "the second has reconciled")
        after = deployed.children("still")
    assert {place: item["metadata"].get("generation") for place, item in after.items()} == before
    assert {place: item["metadata"]["uid"] for place, item in after.items()} == uids
