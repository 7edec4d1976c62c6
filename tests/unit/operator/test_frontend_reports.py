"""What follows from the frontends' reports: readiness gates (docs/architecture.md), cell by cell, and conditions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operator.simulated_world import World, deployment, finish, pair, pool, standing, whole
from unit.operator.test_status import conditions, engines, judged, message, pods, restarted, silent

from mmrouter_operator.model.kinds import ROUTABLE, VERIFIED
from mmrouter_operator.model.snapshot import DeviceReport, FrontendReport, PodView, SharedReport, Snapshot, WorkerReport
from mmrouter_operator.planning.pod_readiness_gates import closed_gates, gate_changes
from mmrouter_operator.status.builder import urgent
from mmrouter_operator.status.conditions import transitions
from mmrouter_operator.status.conditions_from_reports import MISSING_STAGES

NOW = 10_000.0
TIMEOUT = 300.0


def engine(role: str = "worker", **fields: Any) -> PodView:
    closed = {ROUTABLE: False, VERIFIED: False}
    shown: dict[str, Any] = {"containers_ready": True, "started": NOW - 1, "gates": closed, **fields}
    return PodView("e", "team", "e", "work", role, **shown)


def frontend(number: int, ready: bool = True) -> PodView:
    return PodView(f"f{number}", "team", f"f{number}", "", "frontend", ready=ready)


def heard(routable: bool, verified: str = "Unknown", role: str = "worker", **words: str) -> FrontendReport:
    return FrontendReport("r", True, {"e": WorkerReport(role, routable, verified, **words)})


NO_WORKERS = FrontendReport("r", True, {})


def look(
    pod: PodView, *reports: FrontendReport | None, on_failure: str = "Degrade"
) -> dict[str, tuple[bool, str, str]]:
    spec = {**whole(), "verification": {"onFailure": on_failure, "timeoutSeconds": int(TIMEOUT)}}
    fronts = tuple(frontend(number) for number in range(len(reports)))
    by_uid = {f"f{number}": report for number, report in enumerate(reports)}
    return gate_changes(deployment(spec), Snapshot({}, NOW, pods=(pod, *fronts), reports=by_uid)).get("e", {})


def values(found: dict[str, tuple[bool, str, str]]) -> tuple[bool, bool] | None:
    return (found[ROUTABLE][0], found[VERIFIED][0]) if found else None


LATE = NOW - TIMEOUT


def test_closed_gates_are_counted_of_pods_whose_containers_are_ready() -> None:
    half = {ROUTABLE: True, VERIFIED: False}
    pods = (engine(), engine(gates=half), engine(containers_ready=False), engine(deleting=True), engine(gates={}))
    assert closed_gates(Snapshot({}, NOW, pods=(*pods, frontend(0)), reports={}, children={})) == {
        "routable": 1,
        "verified": 2,
    }


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
    reported: list[FrontendReport | None], before: dict[str, bool], started: float | None, on_failure: str
) -> None:
    pod = engine(gates=before, started=started, containers_ready=started is not None)
    found = look(pod, *reported, on_failure=on_failure)
    after = {gate: found[gate][0] for gate in found} or before
    assert set(after) == set(before), "a pod's gate_changes are written together"
    assert all(after[gate] for gate, value in before.items() if value)
    again = dataclasses.replace(pod, gates=after)
    assert look(again, *reported, on_failure=on_failure) == {}


CHAIN = "ChainComplete"


def missing_stages(*each: Sequence[str] | None) -> Callable[[Snapshot], Snapshot]:
    """Return reports of frontends with these missing stages."""

    def change(snapshot: Snapshot) -> Snapshot:
        missing = (None if words is None else tuple(words) for words in each)
        reports = {
            uid: dataclasses.replace(report, degraded=words) if report else None
            for (uid, report), words in zip(snapshot.reports.items(), missing, strict=True)
        }
        return dataclasses.replace(snapshot, reports=reports)

    return change


def test_workers_alone_are_no_chain() -> None:
    spec = whole()
    spec["pools"] = [pool("work")]
    assert CHAIN not in conditions(judged(standing(spec)))


@pytest.mark.parametrize(("word", "reason"), [(word, reason) for word, (reason, _) in MISSING_STAGES.items()])
def test_a_stage_that_all_frontends_miss_is_the_reason_and_it_clears(word: str, reason: str) -> None:
    world = standing(pair())
    world.status = before = judged(world)
    assert conditions(before)[CHAIN] == ("True", "EveryStage")
    world.status = without = judged(world, missing_stages([word], [word]))
    assert conditions(without)[CHAIN] == ("False", reason)
    assert "frontends" not in message(without, CHAIN)
    assert [(event.type, event.reason) for event in transitions(before, without)] == [("Warning", reason)]
    again = judged(world)
    assert conditions(again)[CHAIN] == ("True", "EveryStage")
    assert [(event.type, event.reason) for event in transitions(without, again)] == [("Normal", CHAIN)]


def test_one_frontend_is_enough_and_the_worst_is_the_reason() -> None:
    status = judged(standing(pair()), missing_stages(["no_encoder"], ["no_encoder", "no_prefill"]))
    assert conditions(status)[CHAIN] == ("False", "NoPrefill")
    assert message(status, CHAIN) == (
        "1 of 2 frontends: no prefill pod can take work: prompts are computed where they are decoded; "
        "no encoder can take work: images are encoded where the prompt is computed, by SGLang they are refused"
    )


@pytest.mark.parametrize("change", [silent, missing_stages(None, None)])
def test_frontends_that_are_not_heard_or_too_old_to_tell_are_no_proof(change: Callable[[Snapshot], Snapshot]) -> None:
    world = standing(pair())
    world.status = judged(world)
    assert conditions(judged(world, change))[CHAIN] == ("Unknown", "FrontendNotHeard")


def test_a_frontend_that_is_too_old_to_tell_says_nothing_against_one_that_does() -> None:
    assert conditions(judged(standing(pair()), missing_stages(None, [])))[CHAIN] == ("True", "EveryStage")


def with_frontends_only() -> World:
    world = World(deployment(pair()))
    world.reconcile()
    for name in world.children:
        world.control(name)
    world.start("vl-frontend")
    return world


NO_DECODE = missing_stages(["no_decode"], ["no_decode"])


def test_what_is_on_its_way_for_the_first_time_is_no_loss() -> None:
    world = with_frontends_only()
    world.status = first = judged(world, NO_DECODE)
    assert conditions(first)[CHAIN] == ("Unknown", "Starting")
    assert {event.reason for event in transitions(None, first)}.isdisjoint({"Starting", "NoDecode"})
    finish(world)
    assert conditions(judged(world))[CHAIN] == ("True", "EveryStage")


def test_a_stage_that_cannot_come_is_reported_from_the_start() -> None:
    def stuck(snapshot: Snapshot) -> Snapshot:
        return pods(engines, unschedulable="0/1 nodes are available")(NO_DECODE(snapshot))

    assert conditions(judged(with_frontends_only(), stuck))[CHAIN] == ("False", "NoDecode")


PRESSURE = "ShmPressure"
LIMIT = 8 << 30
Change = Callable[[Snapshot], Snapshot]


def sharing() -> World:
    spec = whole()
    spec["pools"] = [pool("work", replicas=3, sharedMemory={"scope": "node"})]
    return standing(spec)


def pressure(*full: str, frontends: int = 2) -> Change:
    """Frontends say of the engine pods, in the order of their names on nodes n1 to n3, whether their node is full."""
    above = {node: node in full for node in ("n1", "n2", "n3")}

    def change(snapshot: Snapshot) -> Snapshot:
        engines = sorted((pod for pod in snapshot.pods if pod.pool), key=lambda pod: pod.name)
        nodes = dict(zip((pod.uid for pod in engines), above, strict=False))
        pods = tuple(dataclasses.replace(pod, node=nodes.get(pod.uid, pod.node)) for pod in snapshot.pods)
        reports: dict[str, Any] = {}
        for number, (uid, report) in enumerate(snapshot.reports.items()):
            assert report is not None
            workers = {
                engine: dataclasses.replace(worker, shared=SharedReport(above[nodes[engine]], LIMIT))
                if engine in nodes and number < frontends
                else worker
                for engine, worker in report.workers.items()
            }
            reports[uid] = dataclasses.replace(report, workers=workers)
        return dataclasses.replace(snapshot, pods=pods, reports=reports)

    return change


def test_a_node_that_is_full_is_named_with_its_pod_and_limit_and_it_clears() -> None:
    world = sharing()
    world.status = before = judged(world, pressure())
    assert conditions(before)[PRESSURE] == ("False", "BelowHighWaterMark")
    world.status = full = judged(world, pressure("n2"))
    assert conditions(full)[PRESSURE] == ("True", "AboveHighWaterMark")
    second = sorted(pod.name for pod in world.snapshot().pods if pod.pool)[1]
    assert message(full, PRESSURE) == (
        "images travel inside requests until there is room again in the shared directory of "
        f"node n2, as pod {second} says, of 8192 MiB"
    )
    assert [(event.type, event.reason) for event in transitions(before, full)] == [("Warning", "AboveHighWaterMark")]
    assert (full["phase"], conditions(full)["Degraded"]) == ("Ready", ("False", "AsExpected")), "requests are answered"
    again = judged(world, pressure())
    assert conditions(again)[PRESSURE] == ("False", "BelowHighWaterMark")
    assert [(event.type, event.reason) for event in transitions(full, again)] == [("Normal", "Recovered")]


def test_a_status_is_written_when_a_node_fills_and_not_again_while_it_stays_so() -> None:
    world = sharing()
    world.status = judged(world, pressure())
    full = judged(world, pressure("n1"))
    assert urgent(world.status, full)
    world.status = full
    # Another node besides, or one frontend alone that has heard it: words, at most.
    for change in (pressure("n1", "n2"), pressure("n1", frontends=1)):
        assert not urgent(full, judged(world, change))
    assert judged(world, pressure("n1")) == full


def test_sidecars_that_have_not_looked_yet_are_no_proof() -> None:
    assert conditions(judged(sharing()))[PRESSURE] == ("Unknown", "NotMeasured")
    assert conditions(judged(sharing(), silent))[PRESSURE] == ("Unknown", "FrontendNotHeard")


def computing_on(actual: str) -> Change:
    """Frontends report the device of every engine, each of which asks for CUDA."""

    def change(snapshot: Snapshot) -> Snapshot:
        device = DeviceReport(actual, "cuda")
        reports = {
            uid: report
            and dataclasses.replace(
                report, workers={name: dataclasses.replace(w, device=device) for name, w in report.workers.items()}
            )
            for uid, report in snapshot.reports.items()
        }
        return dataclasses.replace(snapshot, reports=reports)

    return change


def test_an_engine_that_fell_back_to_another_device_is_named() -> None:
    world = sharing()
    assert "DeviceMismatch" not in conditions(judged(world))
    assert conditions(judged(world, computing_on("cuda")))["DeviceMismatch"] == ("False", "AsRequested")
    fallen = judged(world, computing_on("cpu"))
    assert conditions(fallen)["DeviceMismatch"] == ("True", "OtherDevice")
    names = [pod.name for pod in world.snapshot().pods if pod.pool]
    assert all(f"pod {name} on cpu instead of cuda" in message(fallen, "DeviceMismatch") for name in names)


def test_a_restarted_operator_keeps_the_last_conditions() -> None:
    world = sharing()
    world.status = judged(world, pressure("n1", "n2", "n3"))
    assert conditions(judged(world, restarted))[PRESSURE] == ("True", "AboveHighWaterMark")
    world = standing(pair())
    world.status = judged(world, NO_DECODE)
    assert conditions(judged(world, restarted))[CHAIN] == ("False", "NoDecode")
