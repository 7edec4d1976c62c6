"""How fast one resource gets its children, and what five hundred of them cost."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster.controlplane import ControlPlane, control_plane, wait_for
from cluster.operators import USER, Replica, idle, operator
from cluster.resources import ROOT, all_there, apply, complete, expected, resource

from mmrouter_operator.ref import CHILDREN, KINDS, RESOURCE

Record = Callable[[str, Any], None]

TIMED, MANY = 50, 500
P95_SECONDS = 1.0
RSS_MB = 400


@pytest.fixture(scope="module")
def large(kube_bin: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replica]:
    """An operator and a control plane of its own: what these tests leave behind would keep others waiting."""
    with control_plane(tmp_path_factory.mktemp("large"), kube_bin, ROOT / "crds") as plane, operator(plane) as replica:
        yield replica


def test_the_children_of_a_new_resource_are_there_within_a_second(large: Replica, record: Record) -> None:
    plane = large.plane
    with plane.namespace() as namespace:
        for number in range(TIMED):
            body = resource(f"one-{number:03}")
            apply(plane, namespace, body)
            wanted = expected(body, namespace)
            wait_for(partial(all_there, plane, wanted, namespace), 20, f"the children of {number} are there")
        idle(plane, USER, 1, 30)
        took = sorted(durations(plane, namespace))
    assert len(took) == TIMED
    p95 = statistics.quantiles(took, n=20)[-1]
    record("apply to last child, s", f"median {statistics.median(took):.2f}, p95 {p95:.2f}, of {TIMED}")
    assert p95 < P95_SECONDS


def durations(plane: ControlPlane, namespace: str) -> Iterator[float]:
    """Yield for each resource how long it took from the request that made it until its last child was made."""
    plurals = {kind.plural for kind in CHILDREN.values()}
    rows = [row for row in plane.audit() if row.namespace == namespace and row.code == 201]
    made = {row.name: row.began for row in rows if row.resource == KINDS[RESOURCE].plural and not row.subresource}
    for name, began in made.items():
        children = [row for row in rows if row.user == USER and row.resource in plurals and row.name.startswith(name)]
        yield max(row.ended for row in children) - began


def test_five_hundred_resources_fit_a_small_operator(large: Replica, record: Record) -> None:
    plane = large.plane
    # Their pods are not of interest here, and would take two CPUs for minutes.
    plane.stop("controller-manager")
    plane.stop("scheduler")
    with plane.namespace() as namespace:
        names = [f"many-{number:03}" for number in range(MANY)]
        for name in names:
            apply(plane, namespace, resource(name))

        for name in names:
            service = [("Service", name)]
            wait_for(partial(all_there, plane, service, namespace), 180, f"{name} has its Service", every=0.2)
        idle(plane, USER, 3, 60)
        assert complete(plane, resource(names[-1]), namespace)
        process = psutil.Process(large.process.pid)
        megabytes, times = process.memory_info().rss / 1e6, process.cpu_times()
    cost = f"{megabytes:.0f} MB resident, {times.user + times.system:.0f} s of CPU since its start"
    record(f"operator with {MANY} resources", cost)
    assert megabytes < RSS_MB
