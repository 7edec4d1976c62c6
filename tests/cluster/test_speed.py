"""Time how long the children of a new resource take, in seconds and relative to the API server's own time."""

import statistics
from collections.abc import Iterator
from functools import partial

from artefacts import Record
from cluster.controlplane import ControlPlane
from cluster.operators import USER, Replica, idle
from cluster.resources import all_there, apply, expected, resource
from long_form import IS_LONG
from waiting import wait_for

from mmrouter_operator.cluster.operator_kinds import CORE_CHILDREN, KINDS
from mmrouter_operator.model.kinds import RESOURCE

TIMED = 50 if IS_LONG else 10


def test_the_children_of_new_resources_are_created_and_timed(large: Replica, record: Record) -> None:
    plane = large.plane
    with plane.namespace() as namespace:
        for number in range(TIMED):
            body = resource(f"one-{number:03}")
            apply(plane, namespace, body)
            wanted = expected(body, namespace)
            wait_for(partial(all_there, plane, wanted, namespace), 120, f"the children of {number} are there")
        idle(plane, USER, 1, 30)
        rows = list(durations(plane, namespace))
    assert len(rows) == TIMED
    took, floors = sorted(took for took, _ in rows), [took / floor for took, floor in rows]
    p95, ratio = statistics.quantiles(took, n=20)[-1], statistics.median(floors)
    record("apply to last child, s", f"median {statistics.median(took):.2f}, p95 {p95:.2f}, of {TIMED}")
    record("the same, in times of the API server's own", f"median {ratio:.2f}, largest {max(floors):.2f}")


def durations(plane: ControlPlane, namespace: str) -> Iterator[tuple[float, float]]:
    """Yield for each resource the seconds from the request that made it until its last child was made, and those of
    them that the API server took for the requests that made its children, one after the other.
    """
    plurals = {kind.plural for kind in CORE_CHILDREN.values()}
    rows = [row for row in plane.audit() if row.namespace == namespace and row.code == 201]
    made = {row.name: row.began for row in rows if row.resource == KINDS[RESOURCE].plural and not row.subresource}
    for name, began in made.items():
        children = [row for row in rows if row.user == USER and row.resource in plurals and row.name.startswith(name)]
        yield max(row.ended for row in children) - began, sum(row.ended - row.began for row in children)
