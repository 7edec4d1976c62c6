"""The status of a deployment: what it shows, what it keeps, and what it never claims."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from unit.operator.simulated_world import World, deployment, finish, pair, standing, want, whole

from mmrouter_lib.api import SpecError
from mmrouter_lib.api.status import Status
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import FrontendReport, PodView, Problem, Snapshot, WorkerReport
from mmrouter_operator.planning.planner import plan
from mmrouter_operator.status.builder import status_of, urgent
from mmrouter_operator.status.conditions import transitions


def conditions(status: dict[str, Any]) -> dict[str, tuple[str, str]]:
    return {item["type"]: (item["status"], item["reason"]) for item in status["conditions"]}


def message(status: dict[str, Any], type_: str) -> str:
    return str(next(item["message"] for item in status["conditions"] if item["type"] == type_))


def judged(
    world: World, change: Callable[[Snapshot], Snapshot] = lambda snapshot: snapshot, *advice: Problem
) -> dict[str, Any]:
    snapshot = change(world.snapshot())
    return status_of(world.dep, snapshot, plan(world.choose()[0], snapshot), advice, world.status)


def pods(which: Callable[[PodView], bool], **fields: Any) -> Callable[[Snapshot], Snapshot]:
    def change(snapshot: Snapshot) -> Snapshot:
        changed = (dataclasses.replace(pod, **fields) if which(pod) else pod for pod in snapshot.pods)
        return dataclasses.replace(snapshot, pods=tuple(changed))

    return change


def with_view(snapshot: Snapshot, of: str, **fields: Any) -> Snapshot:
    """Return the snapshot with the view of a Deployment changed; under another name, where that is changed, added."""
    view = dataclasses.replace(snapshot.children["Deployment", of], **fields)
    return dataclasses.replace(snapshot, children={**snapshot.children, ("Deployment", view.name): view})


def engines(pod: PodView) -> bool:
    return bool(pod.pool)


def counted(**counts: int) -> Callable[[Snapshot], Snapshot]:
    def change(snapshot: Snapshot) -> Snapshot:
        reports = {uid: dataclasses.replace(r, **counts) if r else None for uid, r in snapshot.reports.items()}
        return dataclasses.replace(snapshot, reports=reports)

    return change


def silent(snapshot: Snapshot) -> Snapshot:
    return dataclasses.replace(snapshot, reports=dict.fromkeys(snapshot.reports))


def restarted(snapshot: Snapshot) -> Snapshot:
    """Make it that of an operator that has just started, which has heard no frontend yet."""
    return dataclasses.replace(silent(snapshot), listening_since=snapshot.now - 1)


def waiting(reason: str, sentence: str) -> Callable[[Snapshot], Snapshot]:
    return pods(engines, waiting=("engine", reason, sentence))


def verdict(verified: str, cause: str = "") -> Callable[[Snapshot], Snapshot]:
    def change(snapshot: Snapshot) -> Snapshot:
        running = [pod for pod in snapshot.pods if pod.pool]
        workers = {pod.uid: WorkerReport(pod.role, True, verified, cause) for pod in running}
        heard = {uid: FrontendReport("r", True, workers) for uid in snapshot.reports}
        return dataclasses.replace(snapshot, reports=heard)

    return change


def test_a_deployment_that_serves_says_so_in_every_field() -> None:
    world = standing(whole())
    status = judged(world, counted(decisions=1000, exact_decisions=998, prompt_blocks=700, hit_blocks=583))
    assert conditions(status) == {
        "Ready": ("True", "Serving"),
        "SpecValid": ("True", "Valid"),
        "Progressing": ("False", "Complete"),
        "Degraded": ("False", "AsExpected"),
        **dict.fromkeys(("FrontendReady", "WorkersReady", "EncodersReady", "RenderersReady"), ("True", "AllReady")),
        "ExactRoutingVerified": ("True", "Verified"),
        "ChainComplete": ("True", "EveryStage"),
        "RevisionPinned": ("False", "ModelRevisionUnpinned"),
        "Authenticated": ("False", "NoApiKeys"),
        "PodSecurityRestricted": ("True", "Restricted"),
    }
    assert status["phase"] == "Ready"
    assert status["endpoint"] == "http://vl.team.svc"
    assert status["poolsReady"] == "3/3"
    assert status["routing"] == {"exactRatio": "0.998", "hitRatio": "0.833"}
    selector = "mmrouter.io/deployment=vl,mmrouter.io/role=frontend"
    assert status["frontend"] == {"desired": 2, "ready": 2, "updated": 2, "selector": selector}
    counts = {"desired": 2, "ready": 2, "routable": 2, "verified": 2, "updated": 2}
    assert status["pools"][0] == {"name": "work", "role": "worker", **counts}
    Status.model_validate(status, by_alias=True, by_name=False)


def test_old_pods_are_no_success() -> None:
    world = standing(whole())
    want(world, whole(seed=1))
    status = judged(world)
    assert conditions(status)["Ready"] == ("False", "RollingOut")
    assert conditions(status)["ExactRoutingVerified"] == ("Unknown", "Verifying")
    assert {pool["updated"] for pool in status["pools"]} == {0}
    assert status["phase"] == "Updating"
    assert status["poolsReady"] == "0/3"
    assert {item["observedGeneration"] for item in status["conditions"]} == {status["observedGeneration"]} == {2}


def test_a_time_changes_with_the_status_and_not_with_the_words() -> None:
    world = standing(whole())
    world.status = judged(world)
    world.now += 60
    assert judged(world) == world.status, "nothing changed, so there is nothing to write"
    world.fail("vl-work")
    world.status = broken = judged(world)
    times = {item["type"]: item["lastTransitionTime"] for item in broken["conditions"]}
    assert times["Ready"] == "1970-01-01T00:17:40Z"
    assert times["FrontendReady"] == "1970-01-01T00:16:40Z"
    assert conditions(broken)["WorkersReady"] == ("False", "ReplicasMissing")
    assert conditions(broken)["Ready"] == ("False", "WorkersNotReady")
    world.now += 60
    world.fail("vl-enc")
    again = judged(world)
    assert {item["type"]: item["lastTransitionTime"] for item in again["conditions"]}["Ready"] == times["Ready"]


def test_an_operator_that_has_just_started_keeps_what_was_said_last() -> None:
    world = standing(whole())
    world.status = judged(world, counted(decisions=10, exact_decisions=10))
    opened = pods(engines, gates={"mmrouter.io/routable": True, "mmrouter.io/verified": True})

    def started(snapshot: Snapshot) -> Snapshot:
        return restarted(opened(snapshot))

    assert judged(world, started) == world.status
    world.status = {}
    assert conditions(judged(world, started))["ExactRoutingVerified"] == ("Unknown", "FrontendNotHeard")
    assert "routing" not in judged(world, started)
    assert judged(world, counted(prompt_blocks=3, hit_blocks=1))["routing"] == {"hitRatio": "0.333"}, "of no decision"


def test_frontends_that_stay_silent_are_no_proof() -> None:
    """A stream that cannot be opened must not leave a green condition behind."""
    world = standing(whole())
    world.status = judged(world, counted(decisions=10, exact_decisions=10))
    status = judged(world, silent)
    assert conditions(status)["ExactRoutingVerified"] == ("Unknown", "FrontendNotHeard")
    assert {pool["routable"] for pool in status["pools"]} == {0}
    assert "routing" not in status


def test_a_frontend_that_has_just_become_ready_changes_nothing_before_it_speaks() -> None:
    world = standing(whole())
    world.status = judged(world)

    def joined(snapshot: Snapshot) -> Snapshot:
        first, *_ = (pod for pod in snapshot.pods if not pod.pool)
        new = dataclasses.replace(first, name="new", uid="new", started=snapshot.now - 1)
        return dataclasses.replace(snapshot, pods=(*snapshot.pods, new))

    assert judged(world, joined) == world.status


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (verdict("Unknown"), ("Unknown", "Verifying")),
        (verdict("Unknown", "not_probed"), ("True", "Verified")),
        (verdict("False", "template"), ("False", "NotExact")),
        (lambda snapshot: pods(engines, started=-9e9)(verdict("Unknown")(snapshot)), ("False", "NotVerifiedInTime")),
        (pods(engines, containers_ready=False), ("Unknown", "NoReplicas")),
    ],
)
def test_exactness_is_what_the_frontends_say(change: Callable[[Snapshot], Snapshot], expected: tuple[str, str]) -> None:
    world = standing(whole())
    world.now = 100.0
    assert conditions(judged(world, change))["ExactRoutingVerified"] == expected


KATA = (Ref("node.k8s.io/v1", "RuntimeClass", "", "kata"), "spec.pools[0].podTemplate.spec.runtimeClassName")
MALFORMED = Problem("SecretMalformed", "Secret", "vl-secrets", "Secret vl-secrets: identity.key has 3 bytes")
STUCK = "0/2 nodes are available: 2 node(s) didn't match Pod's node affinity/selector."


@pytest.mark.parametrize(
    ("change", "advice", "reason", "words"),
    [
        (lambda s: dataclasses.replace(s, missing=(KATA,)), (), "RuntimeClassMissing",
         "spec.pools[0].podTemplate.spec.runtimeClassName: there is no RuntimeClass kata"),
        (lambda s: s, (MALFORMED,), "SecretMalformed", "identity.key has 3 bytes"),
        (waiting("ErrImagePull", "manifest unknown"), (), "ImagePullFailed", "container engine of pod vl-enc"),
        (pods(engines, unschedulable=STUCK), (), "Unschedulable", "1 free nvidia.com/gpu"),
        (waiting("CrashLoopBackOff", "back-off"), (), "CrashLoopBackOff", "back-off"),
        (waiting("CreateContainerConfigError", "no key x"), (), "ContainerConfigError", "no key x"),
    ],
)  # fmt: skip
def test_a_problem_is_reported_with_its_place(
    change: Callable[[Snapshot], Snapshot], advice: tuple[Problem, ...], reason: str, words: str
) -> None:
    status = judged(standing(whole()), change, *advice)
    assert conditions(status)["Degraded"] == ("True", reason)
    assert words in message(status, "Degraded")
    assert status["phase"] == "Degraded"


def test_a_hundred_broken_pods_are_one_sentence_per_pool() -> None:
    status = judged(standing(whole()), waiting("ErrImagePull", "manifest unknown"))
    assert message(status, "Degraded").count("manifest unknown") == 3


def test_a_recreated_secret_is_reported_until_every_pod_has_it() -> None:
    world = standing(whole())
    lost = Problem("SecretRecreated", "Secret", "vl-secrets", "Secret vl-secrets was lost and is made anew")
    world.status = judged(world, lambda snapshot: snapshot, lost)
    want(world, whole(seed=1))  # stands for the new fingerprint: every template is another
    world.status = judged(world)
    assert conditions(world.status)["Degraded"] == ("True", "SecretRecreated")
    finish(world)
    assert conditions(judged(world))["Degraded"] == ("False", "AsExpected")


def test_an_invalid_resource_keeps_the_conditions_of_the_one_before() -> None:
    world = standing(whole())
    world.status = before = judged(world)
    error = SpecError([("spec.pools[0].podTemplate.spce", "a pod template has `metadata` and `spec` only")])
    snapshot = world.snapshot()
    edited = dataclasses.replace(snapshot, resource={**snapshot.resource, "metadata": {"generation": 9}})
    status = status_of(error, edited, None, (), before)
    shown = conditions(status)
    assert shown["SpecValid"] == ("False", "Invalid")
    assert shown["Ready"] == ("False", "SpecInvalid")
    assert "spec.pools[0].podTemplate.spce" in message(status, "SpecValid")
    kept = next(item for item in status["conditions"] if item["type"] == "FrontendReady")
    assert kept["observedGeneration"] == 1, "it speaks of the spec that was judged"
    assert status["frontend"]["ready"] == 2
    assert status["phase"] == "Invalid"
    Status.model_validate(status, by_alias=True, by_name=False)


def test_an_invalid_resource_that_never_was_valid_shows_only_what_is_known() -> None:
    snapshot = Snapshot({"metadata": {"generation": 1}}, 0.0)
    status = status_of(SpecError([("spec", "is required")]), snapshot, None, (), None)
    assert set(status) == {"observedGeneration", "phase", "conditions"}
    assert set(conditions(status)) == {"Ready", "SpecValid", "Progressing", "Degraded"}


def test_without_its_secret_a_deployment_is_blocked_and_says_why() -> None:
    world = standing(whole())
    status = status_of(world.dep, world.snapshot(), None, (MALFORMED,), judged(world))
    shown = conditions(status)
    assert (shown["Ready"], shown["Degraded"]) == (("False", "SecretUnusable"), ("True", "SecretMalformed"))
    assert status["phase"] == "Blocked"


HOST_MODEL = {"id": "m", "volume": {"hostPath": {"path": "/w"}}}
PARENT = {"parentRefs": [{"name": "public", "namespace": "infra"}]}
PICKED = {"frontend": {"mode": "endpointPicker"}, "pools": whole()["pools"][:1]}
UNLIKE = [{**pair()["pools"][0], "args": ["--kv-cache-dtype=fp8"]}, pair()["pools"][1]]


@pytest.mark.parametrize(
    ("spec", "type_", "expected"),
    [
        ({"model": {"id": "m", "revision": "a" * 40}}, "RevisionPinned", ("True", "Commit")),
        ({"model": {"id": "m", "revision": "main"}}, "RevisionPinned", ("False", "ModelRevisionUnpinned")),
        ({"model": {"id": "m", "volume": {"emptyDir": {}}}}, "RevisionPinned", None),
        ({"model": HOST_MODEL}, "PodSecurityRestricted", ("False", "BelowRestricted")),
        ({"frontend": {"apiKeys": {"secret": {"name": "k"}}}}, "Authenticated", ("True", "ApiKeys")),
        ({"observability": {"podMonitor": "Enabled"}}, "PodMonitorAvailable", ("False", "PodMonitorUnavailable")),
        ({}, "PodMonitorAvailable", None),
        (PICKED, "GatewayAccepted", ("False", "GatewayApiUnavailable")),
        ({"frontend": {"gateway": PARENT}}, "GatewayAccepted", ("False", "GatewayApiUnavailable")),
        ({}, "GatewayAccepted", None),
        ({}, "PoolsCompatible", None),
        ({"pools": pair()["pools"]}, "PoolsCompatible", ("True", "Compatible")),
        ({"pools": UNLIKE}, "PoolsCompatible", ("False", "LayoutsDiffer")),
        ({}, "AutoscalingAvailable", None),
        ({}, "PodTemplateApplied", None),
    ],
)
def test_warnings_are_there_where_they_apply(
    spec: dict[str, Any], type_: str, expected: tuple[str, str] | None
) -> None:
    world = World(deployment({**whole(), **spec}))
    assert conditions(judged(world)).get(type_) == expected


def test_pools_that_ask_to_be_scaled_and_are_not_are_named() -> None:
    spec = whole()
    spec["pools"][0]["autoscaling"] = {"maxReplicas": 4}
    status = judged(World(deployment(spec)))
    assert conditions(status)["AutoscalingAvailable"] == ("False", "AutoscalingUnavailable")
    assert message(status, "AutoscalingAvailable").startswith("pools work keep their replicas")


def test_a_paused_deployment_keeps_what_only_its_manifests_can_tell() -> None:
    spec = whole()
    spec["pools"][0]["sharedMemory"] = {"scope": "node"}
    world = standing(spec)
    world.status = judged(world)
    want(world, {**spec, "paused": True})
    status = judged(world)
    assert conditions(status)["PodSecurityRestricted"] == ("False", "NodeSharedMemory")
    assert "pool work" in message(status, "PodSecurityRestricted")
    assert conditions(status)["Progressing"] == ("False", "Paused")
    assert status["phase"] == "Paused"


def test_ratios_and_words_are_not_urgent_and_everything_else_is() -> None:
    world = standing(whole())
    first = judged(world, counted(decisions=10, exact_decisions=9))
    world.status = first
    second = judged(world, counted(decisions=20, exact_decisions=9))
    assert first != second
    assert not urgent(first, second)
    world.fail("vl-work")
    assert urgent(first, judged(world))
    assert urgent(None, first)


def test_events_are_of_transitions_only() -> None:
    world = World(deployment(whole()))
    world.reconcile()
    first = judged(world)
    events = {(item.type, item.reason) for item in transitions(None, first)}
    assert events == {("Normal", "RollingOut"), ("Warning", "ModelRevisionUnpinned"), ("Warning", "NoApiKeys")}
    assert transitions(first, first) == []
    world.status = first
    finish(world)
    second = judged(world)
    events = {(item.type, item.reason) for item in transitions(first, second)}
    expected = {"Ready", "FrontendReady", "WorkersReady", "EncodersReady", "RenderersReady", "ExactRoutingVerified"}
    assert events == {("Normal", reason) for reason in (*expected, "ChainComplete", "Complete")}
    world.status = second
    third = judged(world, waiting("ErrImagePull", "manifest unknown"))
    (event,) = transitions(second, third)
    assert (event.type, event.reason) == ("Warning", "ImagePullFailed")
    assert "manifest unknown" in event.note
    (event,) = transitions(third, second)
    assert (event.type, event.reason) == ("Normal", "Recovered")


def test_losing_a_replica_is_an_event_and_rolling_one_is_not() -> None:
    world = standing(whole())
    world.status = before = judged(world)
    world.fail("vl-work")
    lost = judged(world)
    assert {item.reason for item in transitions(before, lost)} >= {"WorkersNotReady", "ReplicasMissing"}
    world = standing(whole())
    world.status = before = judged(world)
    want(world, whole(seed=1))
    assert {item.reason for item in transitions(before, judged(world))} == {"RollingOut"}
