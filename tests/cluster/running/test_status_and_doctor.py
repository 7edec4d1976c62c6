"""`mmrouter doctor` and `mmrouter status` on a deployment that runs and is proved: they see that it is so."""

from cluster.commands import diagnosed, mmrouter, views
from cluster.controlplane import ControlPlane


def test_doctor_finds_no_problem_and_sees_events_and_proofs(real: ControlPlane, proved: str) -> None:
    told = diagnosed(real, "demo", "-n", proved)
    assert told.problems == []
    assert told.status == 0
    assert told.seen("events", "ok")[0].count("demo-worker-") == 2
    assert told.seen("exactness", "ok")[0].count("demo-worker-") == 2
    for check in ("definition", "operator", "nodes", "references", "pods", "frontends"):
        assert told.seen(check, "ok"), check


def test_status_shows_both_engines_proved(real: ControlPlane, proved: str) -> None:
    (view,) = views(real, "demo", "-n", proved)
    assert view["phase"] == "Ready"
    assert [(pool["name"], pool["ready"], pool["verified"]) for pool in view["pools"]] == [("worker", 2, 2)]
    assert [worker["exact"] for worker in view["workers"]] == ["True", "True"]
    assert "ExactRoutingVerified" in mmrouter(real, "status", "demo", "-n", proved).stdout
