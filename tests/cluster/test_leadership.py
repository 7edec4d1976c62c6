"""Of two replicas one writes, and the other takes over; the API server's audit log is the witness."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby

import pytest
from cluster.audit import AuditRow
from cluster.controlplane import ControlPlane
from cluster.operators import BRIEF, USER, Replica, holder, operator
from cluster.resources import apply, complete, delete, resource
from waiting import wait_for

LEASE_SECONDS = 6


@pytest.fixture
def replicas(crd: ControlPlane) -> Iterator[tuple[Replica, Replica]]:
    """Two replicas with filled caches: the one that leads, and the other."""
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
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.05):
            if complete(plane, body, namespace):
                delete(plane, "Service", namespace, "demo")

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


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
        first.resume()
        woken = time.time()
        wait_for(lambda: len(writes(crd, woken)) > 20, 20, "the second replica goes on")
    seen = [(row.agent[-4:-1], round(row.began - woken, 3), row.verb, row.resource) for row in writes(crd, began)]
    assert writers(crd, began) == [first.identity, second.identity], seen
    assert second.leads()


def test_a_leader_that_is_killed_is_followed_by_the_other(
    crd: ControlPlane, replicas: tuple[Replica, Replica], namespace: str
) -> None:
    first, second = replicas
    began = time.time()
    with work(crd, namespace):
        wait_for(lambda: writers(crd, began) == [first.identity], 10, "the first replica writes")
        first.kill()
        wait_for(
            lambda: writers(crd, began) == [first.identity, second.identity],
            LEASE_SECONDS * 5,
            "the second replica writes",
        )
    assert second.leads()


def test_a_leader_that_is_terminated_releases_its_lease(
    crd: ControlPlane, replicas: tuple[Replica, Replica], namespace: str
) -> None:
    first, second = replicas
    began = time.time()
    with work(crd, namespace):
        wait_for(lambda: writers(crd, began) == [first.identity], 10, "the first replica writes")
        assert first.stop() == 0
        assert holder(crd) != first.identity  # released, although it is valid for some seconds yet
        wait_for(second.leads, 2 * LEASE_SECONDS, "the second replica leads")
        wait_for(lambda: writers(crd, began) == [first.identity, second.identity], 10, "the second replica writes")
