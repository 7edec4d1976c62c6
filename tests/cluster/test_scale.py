"""What an operator with many resources costs."""

from functools import partial

import psutil
from artefacts import Record
from cluster.operators import USER, Replica, idle
from cluster.resources import all_there, apply, complete, resource
from long_form import IS_LONG
from waiting import wait_for

MANY = 500 if IS_LONG else 100
RSS_MB = 400


def test_many_resources_fit_a_small_operator(large: Replica, record: Record) -> None:
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
