"""Of two replicas one writes, and the other takes over; the audit log is witness. What stays without an operator."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import pytest
from cluster.access import AuditRow
from cluster.controlplane import ControlPlane
from cluster.deployments import SECONDS, Deployed
from cluster.hollow_kubelet import Hollow
from cluster.operators import BRIEF, USER, Replica, holder, idle, operator
from cluster.resources import apply, complete, delete, resource
from waiting import repeating, wait_for

LEASE_SECONDS = 6


@pytest.fixture
def replicas(crd: ControlPlane) -> Iterator[tuple[Replica, Replica]]:
    with operator(crd, "one", options=BRIEF, wait=False) as one, operator(crd, "two", options=BRIEF, wait=False) as two:
        wait_for(lambda: one.ready() and two.ready(), 60, "both replicas have filled their caches")
        wait_for(lambda: holder(crd) in ("one", "two"), 30, "one of them leads")
        yield (one, two) if one.leads() else (two, one)


@contextmanager
def work(plane: ControlPlane, namespace: str) -> Iterator[None]:
    """Give the operator something to write all the time: a child that is deleted again and again."""
    body = resource()
    apply(plane, namespace, body)
    wait_for(lambda: complete(plane, body, namespace), 20, "all children are there")

    def disturb() -> None:
        if complete(plane, body, namespace):
            delete(plane, "Service", namespace, "demo")

    with repeating(disturb, 0.05):
        yield


def writes(plane: ControlPlane, since: float) -> list[AuditRow]:
    """Return the operators' writes, without those to the Lease, in the order in which the server took them."""
    rows = (row for row in plane.audit(since) if row.user == USER and row.writes and row.resource != "leases")
    return sorted(rows, key=lambda row: row.began)


def writers(plane: ControlPlane, since: float) -> list[str]:
    """Return who wrote, in order, each once for a stretch of writes."""
    return [who for who, _ in groupby(row.agent.rpartition("(")[2].rstrip(")") for row in writes(plane, since))]


def test_a_replica_that_does_not_lead_writes_nothing(
    crd: ControlPlane, replicas: tuple[Replica, Replica], namespace: str
) -> None:
    began = time.time()
    with work(crd, namespace):
        wait_for(lambda: len(writes(crd, began)) > 30, 30, "the leader writes")
    assert writers(crd, began) == [replicas[0].identity]


def test_a_paused_leader_writes_nothing_when_it_wakes_after_its_lease(
    crd: ControlPlane, replicas: tuple[Replica, Replica], namespace: str
) -> None:
    first, second = replicas
    began = time.time()
    with work(crd, namespace):
        wait_for(lambda: writers(crd, began) == [first.identity], 10, "the first replica writes")
        first.pause()
        wait_for(second.leads, LEASE_SECONDS * 4, "the second replica leads")
        taken = time.time()
        wait_for(lambda: len(writes(crd, taken)) > 5, 10, "the second replica writes")
        first.process.send_signal(signal.SIGCONT)
        woken = time.time()
        wait_for(lambda: len(writes(crd, woken)) > 20, 20, "the second replica goes on")
    seen = [(row.agent[-4:-1], round(row.began - woken, 3), row.verb, row.resource) for row in writes(crd, began)]
    assert writers(crd, began) == [first.identity, second.identity], seen
    assert second.leads()


@pytest.mark.parametrize("ended", ["killed", "terminated"])
def test_a_leader_that_ended_is_followed_by_the_other_at_once_where_it_released_its_lease(
    crd: ControlPlane, replicas: tuple[Replica, Replica], namespace: str, ended: str
) -> None:
    first, second = replicas
    began = time.time()
    with work(crd, namespace):
        wait_for(lambda: writers(crd, began) == [first.identity], 10, "the first replica writes")
        if ended == "killed":
            first.kill()
        else:
            assert first.stop() == 0
            assert holder(crd) != first.identity  # released, although it is valid for some seconds yet
            wait_for(second.leads, 2 * LEASE_SECONDS, "the second replica leads")
        both = [first.identity, second.identity]
        wait_for(lambda: writers(crd, began) == both, LEASE_SECONDS * 5, "the second replica writes")
    assert second.leads()


def test_deleting_collects_everything_with_the_operator_down(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd):
        deployed.made("doomed")
    assert deployed.children("doomed")
    deployed.delete("mmrouterdeployments", "doomed")
    wait_for(lambda: not deployed.children("doomed"), 60, "all children are collected")
    assert deployed.get("mmrouterdeployments", "doomed") is None


def test_a_new_operator_finds_everything_in_order_and_changes_nothing(
    crd: ControlPlane, kubelet: Hollow, namespace: str
) -> None:
    deployed = Deployed(crd, namespace)
    with operator(crd, "first"):
        deployed.made("still")
        idle(crd, USER, 1.0, SECONDS)  # the pods are up, and the status says so
    before = versions(deployed)
    with operator(crd, "second") as second:
        wait_for(lambda: 'result="success"' in second.metrics(), SECONDS, "the second has reconciled")
        assert versions(deployed) == before


def versions(deployed: Deployed) -> dict[tuple[str, str], tuple[str, int | None]]:
    children = deployed.children("still").items()
    return {place: (item["metadata"]["uid"], item["metadata"].get("generation")) for place, item in children}
