"""An operator with nothing to do writes nothing, and one whose frontends are busy writes seldom."""

import time
from itertools import pairwise

from cluster.audit import AuditRow
from cluster.controlplane import ControlPlane
from cluster.load import load
from cluster.operators import USER, idle
from cluster.resources import apply, is_done, resource
from waiting import wait_for

WINDOW_SECONDS = 60.0
STATUS_SECONDS = 30.0
"""At most one write of a status in so long, while only its numbers change."""


def test_an_idle_resource_is_never_written_and_a_busy_ones_status_at_most_every_30_s(
    real: ControlPlane, proved: str
) -> None:
    with real.namespace() as another:
        generation = apply(real, another, resource("idle"))["metadata"]["generation"]
        wait_for(lambda: is_done(real, another, "idle", generation), 90, "the second deployment is ready")
        idle(real, USER, 3, 60)
        began = time.time()
        with load(real, proved, "demo") as seen:
            wait_for(lambda: time.time() > began + WINDOW_SECONDS, WINDOW_SECONDS + 5, "the window is over")
        rows = real.audit(began)
    assert seen.failures == []
    assert seen.answered > 100
    writes = [row for row in rows if row.user == USER and row.writes and row.resource != "leases"]
    statuses = [row for row in writes if is_status(row)]
    assert [str(row) for row in writes if row not in statuses] == []
    assert statuses, "the numbers of a busy deployment reach its status"
    gaps = [later.began - row.began for row, later in pairwise(statuses)]
    assert min(gaps, default=STATUS_SECONDS) > STATUS_SECONDS - 1, gaps


def is_status(row: AuditRow) -> bool:
    """Whether a row is a write of the busy deployment's status."""
    return (row.resource, row.subresource, row.name) == ("mmrouterdeployments", "status", "demo")
