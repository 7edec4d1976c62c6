"""Whole reconciles against a table of objects: what is written and reported, also after failures."""

import copy
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from unit.operator.team import KEY, SPEC, Team
from unit.operator.test_model import served

from mmrouter_operator.cluster.client import Conflict, Object, Refused, Unavailable
from mmrouter_operator.cluster.work_queue import Retry
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.kinds import CHILD_SELECTOR, RESOURCE, ROUTABLE, VERIFIED, Ref
from mmrouter_operator.runtime import reconciler as module
from mmrouter_operator.runtime.reconciler import GATE_RETRY_SECONDS, REPORTED_FAILURES
from mmrouter_operator.status import writer as statuses


@pytest.fixture
async def team() -> AsyncIterator[Team]:
    one = Team()
    yield one
    await one.streams.close()


async def test_the_frontends_get_the_status_as_it_was_written_and_the_steps_of_the_plan(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Object] = []
    monkeypatch.setattr(team.streams, "publish", lambda key, status: sent.append({"key": key, **status}))
    team.want()
    await team.run()
    status = team.resource["status"]
    assert [(each["key"], each["phase"], each["conditions"]) for each in sent] == [
        (KEY, status["phase"], status["conditions"])
    ]
    assert ("create", "Deployment", "vl-worker") in {(step.action, step.kind, step.name) for step in sent[0]["steps"]}
    team.want(2, engine={"type": "vllm", "args": ["--seed", "1", "--nonsense"]}, pools=[])
    await team.run()
    assert sent[1]["phase"] == team.resource["status"]["phase"] == "Invalid"
    assert sent[1]["steps"] == ()


def broken(*_: Any, **__: Any) -> Any:
    raise TypeError("unhashable type: 'dict'")


async def test_a_spec_that_needs_the_sites_configuration_is_valid_with_it() -> None:
    team = Team(OperatorConfig(engine_images={"vllm/gaudi": "registry.example/gaudi:1"}))
    pool = {**SPEC["pools"][0], "accelerator": {"kind": "gaudi"}, "podTemplate": {"metadata": {"labels": {"a": "b"}}}}
    team.want(pools=[pool])
    await team.run()
    assert team.of_kind("Deployment") == ["vl-frontend", "vl-worker"]
    assert team.condition("SpecValid")["status"] == "True"
    assert team.condition("PodTemplateApplied")["status"] == "True"
    await team.streams.close()


@pytest.mark.parametrize("part", ["render", "choose_templates", "plan", "gate_changes", "references"])
async def test_a_bug_of_the_operator_is_reported_in_the_status_and_raised(
    team: Team, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    team.want()
    with monkeypatch.context() as patch:
        patch.setattr(module, part, broken)
        with pytest.raises(TypeError):
            await team.run()
        assert team.condition("Degraded")["reason"] == "ReconcileFailed"
        assert "unhashable type" in team.condition("Degraded")["message"]
        assert team.condition("Ready")["status"] == "Unknown"
        assert [reason for _, reason, _ in team.table.events] == ["ReconcileFailed"]
        writes = team.sent("status")
        with pytest.raises(TypeError):
            await team.run()
        assert team.sent("status") == writes, "reported once"
    await team.run()
    assert team.condition("Degraded")["reason"] != "ReconcileFailed"
    assert team.condition("Ready")["reason"] != "ReconcileFailed"


async def test_a_status_that_cannot_be_judged_is_reported_and_keeps_known_values(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.want()
    await team.run()
    before = team.condition("WorkersReady")
    monkeypatch.setattr(statuses, "status_of", broken)
    with pytest.raises(TypeError):
        await team.run()
    assert team.condition("WorkersReady") == before
    assert team.resource["status"]["phase"] == "Failed"


async def test_an_error_whose_status_cannot_be_written_is_raised_itself(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.want()
    monkeypatch.setattr(module, "plan", broken)
    team.table.fail["status"] = Unavailable("down")
    with pytest.raises(TypeError):
        await team.run()


async def test_a_failing_call_is_no_error_of_the_operators_own(team: Team) -> None:
    team.want()
    team.table.fail["status"] = Unavailable("down")
    with pytest.raises(Retry):
        await team.run()
    assert "status" not in team.resource


async def test_a_refused_status_is_reported_once_and_tried_again_after_a_while_and_on_change(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 1000.0
    monkeypatch.setattr(statuses, "boot_time", lambda: clock)
    team.want()
    team.table.fail["status"] = Refused("spec.model: Required value", status=422)
    await team.run(3)
    assert team.sent("status") == 1
    ((type_, reason, note),) = team.table.events
    assert (type_, reason) == ("Warning", "StatusRefused")
    assert "spec.model: Required value" in note
    clock += statuses.REFUSED_FOR
    await team.run()
    assert (team.sent("status"), len(team.table.events)) == (2, 1), "the server may have changed"
    del team.table.fail["status"]
    team.want(generation=2)
    await team.run()
    assert team.resource["status"]["observedGeneration"] == 2


async def test_an_edit_that_came_during_a_run_is_looked_at_though_the_watch_brings_nothing_new(team: Team) -> None:
    team.want()
    stale = copy.deepcopy(team.resource)
    team.table.store({**stale, "metadata": {**stale["metadata"], "generation": 2}})
    assert await team.reconciler.reconcile(KEY) == 0.0


async def test_a_secret_counts_as_lost_only_where_this_very_resource_had_one(team: Team) -> None:
    team.want()
    before = {"uid": "of-the-one-before", "controller": True, "kind": RESOURCE, "name": "vl", "apiVersion": "x"}
    labels = {"mmrouter.io/deployment": "vl", "app.kubernetes.io/managed-by": CHILD_SELECTOR}
    metadata = {"name": "vl-gone", "namespace": "team", "labels": labels, "ownerReferences": [before]}
    spec = {"replicas": 1, "template": {"metadata": {}, "spec": {}}}
    team.table.edit({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec})
    await team.run()
    assert team.condition("Degraded").get("reason") != "SecretRecreated"
    team.lose_secret(replace=True)
    await team.run()
    assert team.condition("Degraded")["reason"] == "SecretRecreated"


def templates(team: Team) -> list[Object]:
    return [obj["spec"]["template"] for ref, obj in team.table.objects.items() if ref.kind == "Deployment"]


@pytest.mark.parametrize("keeps", [True, False], ids=["by accident", "to replace its keys"])
async def test_a_deleted_secret_keeps_its_keys_unless_it_is_marked_for_replacement(team: Team, keeps: bool) -> None:
    team.want()
    await team.run()
    running, before = templates(team), team.lose_secret(replace=not keeps)["data"]
    await team.run()
    [after] = [obj["data"] for ref, obj in team.table.objects.items() if ref.kind == "Secret"]
    assert (after == before, templates(team) == running) == (keeps, keeps)
    assert (team.condition("Degraded").get("reason") == "SecretRecreated") != keeps


async def test_a_secret_that_was_unusable_when_it_was_deleted_gets_new_keys(team: Team) -> None:
    team.want()
    await team.run()
    [before] = [obj["data"] for ref, obj in team.table.objects.items() if ref.kind == "Secret"]
    team.lose_secret(data={**before, "identity.key": ""})
    await team.run()
    [after] = [obj["data"] for ref, obj in team.table.objects.items() if ref.kind == "Secret"]
    assert not after.items() & before.items()


async def test_renderings_do_not_pile_up_while_a_child_is_refused(team: Team) -> None:
    team.table.fail["vl-frontend"] = Refused("quota", status=403)
    for generation in range(1, 20):
        team.want(generation, engine={"type": "vllm", "args": ["--seed", str(generation)]})
        await team.run()
    assert team.condition("Degraded")["reason"] == "ChildRefused"
    assert 1 < len(team.of_kind("ControllerRevision")) < 10


def pod(name: str, **status: Any) -> Object:
    labels = {"mmrouter.io/deployment": "vl", "mmrouter.io/pool": "worker", "mmrouter.io/role": "worker"}
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    gates = (ROUTABLE, VERIFIED)
    conditions = [
        {"type": "ContainersReady", "status": "True", "lastTransitionTime": since},
        {"type": "Ready", "status": "True", "lastTransitionTime": since},
        *({"type": gate, "status": "True"} for gate in gates),
    ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "team", "labels": labels},
        "spec": {"readinessGates": [{"conditionType": gate} for gate in gates], "containers": [{"name": "engine"}]},
        "status": {"phase": "Running", "podIP": "10.0.0.9", "conditions": conditions, **status},
    }


async def test_a_run_that_fails_begins_the_pauses_anew_exactly_when_it_got_further(team: Team) -> None:
    team.want()
    team.table.fail["vl-frontend"] = Unavailable("down")
    with pytest.raises(Retry) as first:
        await team.run()
    assert first.value.reset, "children that come before the frontend's Service are there now"
    with pytest.raises(Retry) as second:
        await team.run()
    assert not second.value.reset
    service = Ref("v1", "Service", "team", "vl")
    team.cache.remove("Service", team.table.objects.pop(service)["metadata"]["uid"])
    with pytest.raises(Retry) as third:
        await team.run()
    assert service in team.table.objects, "the deleted child is back"
    assert not third.value.reset, "two who undo each other's work get nowhere"
    team.table.fail.clear()
    team.table.fail["vl-worker"] = Unavailable("down")
    with pytest.raises(Retry) as fourth:
        await team.run()
    assert fourth.value.reset


async def test_a_restarted_engine_with_open_gates_is_looked_at_when_its_time_to_be_proved_is_over(team: Team) -> None:
    team.want(verification={"timeoutSeconds": 30})
    await team.run()
    team.table.edit(pod("vl-worker-1"))
    again = await team.reconciler.reconcile(KEY)
    assert again is not None
    assert again <= 31.0


async def test_a_pod_that_did_not_take_its_gates_is_looked_at_again_soon(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def busy(*_: Any) -> None:
        raise Conflict("the object has been modified")

    monkeypatch.setattr(team.table, "apply_gates", busy, raising=False)
    team.want(verification={"onFailure": "Degrade"})
    await team.run()
    late = pod("vl-worker-1")
    for condition in late["status"]["conditions"]:
        ours = condition["type"].startswith("mmrouter.io/")
        condition |= {"lastTransitionTime": "2026-01-01T00:00:00Z", "status": "False" if ours else "True"}
    team.table.edit(late)
    again = await team.reconciler.reconcile(KEY)
    assert again is not None
    assert again <= GATE_RETRY_SECONDS


def waiting(name: str) -> Object:
    """A pod whose containers are ready and whose gates were never set."""
    made = pod(name)
    made["status"]["conditions"] = [
        {**condition, "lastTransitionTime": "2026-01-01T00:00:00Z"}
        for condition in made["status"]["conditions"]
        if not condition["type"].startswith("mmrouter.io/")
    ]
    return made


async def test_a_pod_whose_gates_are_refused_delays_no_other_pod_and_is_reported(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = set[str]()

    async def apply_gates(pod: Any, _: Any) -> None:
        if pod.name == "vl-worker-1":
            raise Refused("denied by a webhook")
        taken.add(pod.name)

    monkeypatch.setattr(team.table, "apply_gates", apply_gates, raising=False)
    team.want(verification={"onFailure": "Degrade"})
    await team.run()
    for name in ("vl-worker-1", "vl-worker-2"):
        team.table.edit(waiting(name))
    for _ in range(REPORTED_FAILURES):
        with pytest.raises(Retry, match="denied by a webhook"):
            await team.run()
    assert taken == {"vl-worker-2"}
    assert "Pod vl-worker-1" in team.condition("Degraded")["message"]


async def test_pods_that_are_replaced_under_a_spec_that_cannot_be_rendered_get_their_gates(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = list[str]()

    async def apply_gates(pod: Any, _: Any) -> None:
        taken.append(pod.name)

    monkeypatch.setattr(team.table, "apply_gates", apply_gates, raising=False)
    team.want(verification={"onFailure": "Degrade"})
    await team.run()
    malformed = {**SPEC["pools"][0], "podTemplate": {"spec": {"containers": "engine"}}}
    team.want(generation=2, verification={"onFailure": "Degrade"}, pools=[malformed])
    team.table.edit(waiting("vl-worker-1"))
    await team.run()
    assert team.condition("SpecValid")["status"] == "False"
    assert taken == ["vl-worker-1"]


async def test_what_a_newer_definition_filled_in_is_no_fault_and_is_counted(
    team: Team, caplog: pytest.LogCaptureFixture
) -> None:
    team.table.schema = served(sidecar__novelty=7)
    team.want(sidecar={"novelty": 7})
    with caplog.at_level(logging.WARNING):
        await team.run(3)
    assert team.condition("SpecValid")["status"] == "True"
    assert team.of_kind("Deployment") == ["vl-frontend", "vl-worker"]
    assert [r.message for r in caplog.records if "has its default" in r.message] == [
        "team/vl: spec.sidecar.novelty is unknown to this release and has its default value: ignored"
    ]
    assert 'ignored_fields{name="vl",namespace="team"} 1.0' in team.shown()
    team.want(generation=2)
    await team.run()
    assert "ignored_fields{" not in team.shown()


async def test_a_set_field_of_a_newer_release_is_refused(team: Team) -> None:
    team.table.schema = served(sidecar__novelty=7)
    team.want(sidecar={"novelty": 8})
    await team.run()
    assert team.condition("SpecValid")["status"] == "False"
    assert "spec.sidecar.novelty: no such field" in team.condition("SpecValid")["message"]
    assert team.of_kind("Deployment") == []


async def test_a_schema_that_is_not_published_yet_is_waited_for_and_not_for_ever(team: Team) -> None:
    team.table.schema = served()
    team.want(sidecar={"novelty": 7})
    for _ in range(module.SCHEMA_RETRIES):
        with pytest.raises(Retry, match="not published yet"):
            await team.run()
    assert "status" not in team.resource
    await team.run()
    assert team.condition("SpecValid")["status"] == "False"
    team.table.schema = served(sidecar__novelty=7)
    await team.run()
    assert team.condition("SpecValid")["status"] == "True"
