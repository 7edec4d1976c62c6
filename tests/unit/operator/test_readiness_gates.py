"""The table of readiness gate_changes (docs/architecture.md), cell by cell and at random."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operator.rollout_stories import whole
from unit.operator.simulated_world import deployment

from mmrouter_operator.model.labels import ROUTABLE, VERIFIED
from mmrouter_operator.model.snapshot import FrontendReport, PodView, Snapshot, WorkerReport
from mmrouter_operator.planning.pod_readiness_gates import gate_changes

NOW = 10_000.0
TIMEOUT = 300.0


def engine(role: str = "worker", **fields: Any) -> PodView:
    closed = {ROUTABLE: False, VERIFIED: False}
    shown: dict[str, Any] = {"containers_ready": True, "started": NOW - 1, "gates": closed, **fields}
    return PodView("e", "team", "e", "vl", "work", role, **shown)


def frontend(number: int, ready: bool = True) -> PodView:
    return PodView(f"f{number}", "team", f"f{number}", "vl", "", "frontend", ready=ready)


def heard(routable: bool, verified: str = "Unknown", role: str = "worker", **words: str) -> FrontendReport:
    return FrontendReport("r", True, {"e": WorkerReport("e", "work", role, routable, verified, **words)})


NO_WORKERS = FrontendReport("r", True, {})


def look(
    pod: PodView, *reports: FrontendReport | None, on_failure: str = "Degrade"
) -> dict[str, tuple[bool, str, str]]:
    spec = {**whole(), "verification": {"onFailure": on_failure, "timeoutSeconds": int(TIMEOUT)}}
    fronts = tuple(frontend(number) for number in range(len(reports)))
    said = {f"f{number}": report for number, report in enumerate(reports)}
    return gate_changes(deployment(spec), Snapshot({}, NOW, pods=(pod, *fronts), reports=said)).get("e", {})


def values(found: dict[str, tuple[bool, str, str]]) -> tuple[bool, bool] | None:
    return (found[ROUTABLE][0], found[VERIFIED][0]) if found else None


LATE = NOW - TIMEOUT


@pytest.mark.parametrize("on_failure", ["Degrade", "Refuse"])
def test_an_encoder_of_which_nothing_can_be_proved_is_let_in_once_it_answers(on_failure: str) -> None:
    silent = heard(False, role="encoder", cause="not_answered")
    answers = heard(True, role="encoder", cause="not_probed")
    assert look(engine("encoder"), silent, silent, on_failure=on_failure) == {}
    found = look(engine("encoder"), answers, silent, on_failure=on_failure)
    assert (values(found), found[VERIFIED][1]) == ((False, True), "NothingToProve")
    assert values(look(engine("encoder"), answers, answers, on_failure=on_failure)) == (True, True)


@pytest.mark.parametrize("role", ["worker", "prefill", "decode", "encoder", "renderer"])
@pytest.mark.parametrize(
    ("reports", "started", "on_failure", "expected"),
    [
        ([], NOW - 1, "Degrade", None),
        ([], LATE, "Degrade", (False, True)),
        ([None, None], LATE, "Refuse", None),
        (["routable"], NOW - 1, "Degrade", (True, False)),
        (["routable", "routable"], NOW - 1, "Refuse", (True, False)),
        (["routable", "absent"], NOW - 1, "Degrade", None),
        (["routable", None], NOW - 1, "Degrade", None),
        (["proved", "routable"], NOW - 1, "Refuse", (True, True)),
        (["proved", "failed"], NOW - 1, "Refuse", (True, True)),
        (["failed", "failed"], NOW - 1, "Degrade", (True, False)),
        (["failed", "failed"], LATE, "Degrade", (True, True)),
        (["failed", "failed"], LATE, "Refuse", (True, False)),
        (["routable", "unheld"], LATE, "Degrade", (True, True)),
        (["routable", "unheld"], LATE, "Refuse", None),
        (["unheld", "unheld"], LATE, "Degrade", (False, True)),
        (["absent", "absent"], LATE, "Degrade", (True, True)),
        (["absent", "absent"], LATE, "Refuse", None),
    ],
)
def test_the_table(
    role: str, reports: list[str | None], started: float, on_failure: str, expected: tuple[bool, bool] | None
) -> None:
    words = {
        "routable": heard(True, role=role),
        "proved": heard(True, "True", role),
        "failed": heard(True, "False", role, cause="template"),
        "unheld": heard(False, role=role),
        "absent": NO_WORKERS,
    }
    found = look(engine(role, started=started), *[words[r] if r else None for r in reports], on_failure=on_failure)
    assert values(found) == expected


def test_the_reason_of_a_closed_gate_names_the_cause() -> None:
    found = look(engine(), heard(True, "False", cause="template", message="token 7 differs"))
    assert found[VERIFIED] == (False, "NotExact", "template: token 7 differs")
    found = look(engine(started=LATE), heard(True, "False", cause="template", message="token 7 differs"))
    assert found[VERIFIED][:2] == (True, "NotExactInTime")


def test_a_pod_whose_containers_are_not_ready_waits_however_old_it_is() -> None:
    assert look(engine(started=None, containers_ready=False, created=0.0), NO_WORKERS) == {}


def test_a_frontend_that_is_not_ready_has_no_say() -> None:
    spec = deployment(whole())
    pods = (engine(), frontend(0), frontend(1, ready=False))
    found = gate_changes(spec, Snapshot({}, NOW, pods=pods, reports={"f0": heard(True, "True"), "f1": None}))
    assert values(found["e"]) == (True, True)


def test_pods_that_leave_and_pods_without_gates_are_left_alone() -> None:
    assert look(engine(deleting=True), heard(True, "True")) == {}
    assert look(engine(gates={}), heard(True, "True")) == {}


reports = st.one_of(
    st.none(), st.just(NO_WORKERS), st.builds(heard, st.booleans(), st.sampled_from(["True", "False", "Unknown"]))
)


@given(
    st.lists(reports, max_size=3),
    st.fixed_dictionaries({ROUTABLE: st.booleans(), VERIFIED: st.booleans()}),
    st.sampled_from([LATE, NOW, None]),
    st.sampled_from(["Degrade", "Refuse"]),
)
def test_an_open_gate_never_closes_and_nothing_is_written_twice(
    said: list[FrontendReport | None], before: dict[str, bool], started: float | None, on_failure: str
) -> None:
    pod = engine(gates=before, started=started, containers_ready=started is not None)
    found = look(pod, *said, on_failure=on_failure)
    after = {gate: found[gate][0] for gate in found} or before
    assert set(after) == set(before), "a pod's gate_changes are written together"
    assert all(after[gate] for gate, value in before.items() if value)
    again = dataclasses.replace(pod, gates=after)
    assert look(again, *said, on_failure=on_failure) == {}
