"""A gate that stays closed raises its alert in Debian's Prometheus, which scrapes the running operator.

The other alerts are raised by ``tests/local/test_alerts.py``. The rules are the chart's, at the same pace.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster.controlplane import ControlPlane
from cluster.hollow_kubelet import Hollow
from cluster.operators import PORT, Replica, operator
from cluster.resources import apply, resource
from local.prometheus import ALERT_SECONDS, PROMETHEUS, Prometheus, Target, assert_raised_by, prometheus
from waiting import wait_for

# promtool evaluates the rule over recorded series in every run (tests/chart/test_alerts.py).
pytestmark = [pytest.mark.skipif(PROMETHEUS is None, reason="not run: no prometheus"), pytest.mark.long_form]


@pytest.fixture
def replica(crd: ControlPlane, kubelet: Hollow) -> Iterator[Replica]:
    with operator(crd) as made:
        yield made


@pytest.fixture
def watching(replica: Replica, tmp_path: Path) -> Iterator[Prometheus]:
    with prometheus(tmp_path, [Target(f"{replica.address}:{PORT}", {"namespace": "mmrouter-system"})]) as made:
        yield made


def test_frontends_that_never_report_raise_gate_stuck(watching: Prometheus, crd: ControlPlane, namespace: str) -> None:
    """The pods are hollow: their containers are ready, and no frontend reports an engine to the operator."""
    about = f"{namespace}/demo"
    assert_raised_by(watching, "MMRouterGateStuck", lambda: apply(crd, namespace, resource()), about)

    def gates() -> set[str]:
        return {each["labels"]["gate"] for each in watching.alerts() if each["state"] == "firing"}

    wait_for(lambda: gates() == {"routable", "verified"}, ALERT_SECONDS, "both gates are stuck", known=watching.alerts)
