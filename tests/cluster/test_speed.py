"""How fast one resource gets its children, where nothing else runs."""

import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from cluster.controlplane import ControlPlane, wait_for
from cluster.operators import USER, Replica, idle
from cluster.resources import all_there, apply, expected, resource

from mmrouter_operator.ref import CHILDREN, KINDS, RESOURCE

Record = Callable[[str, Any], None]

TIMED = 50
P95_SECONDS = 1.0


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
