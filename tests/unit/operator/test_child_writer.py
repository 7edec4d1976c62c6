"""Writing children: only what changed, nothing of others, in order. The cluster is a table with the server's rules."""

from typing import Any

import pytest
from unit.operator.fake_cluster import KEY, OWNER, Table, manifest
from unit.operator.test_lease import Time

from mmrouter_operator.cluster import child_writer as module
from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.child_writer import ChildWriter, WriteResult
from mmrouter_operator.cluster.client import Object, Refused, Unavailable
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import CHILD_CONTESTED, CHILD_NAME_TAKEN, CHILD_REFUSED, Problem


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    time = Time(1000.0)
    monkeypatch.setattr(module, "boot_time", time)
    return time


@pytest.fixture
def children(table: Table, cache: WatchCache, clock: Time) -> ChildWriter:
    cluster: Any = table
    return ChildWriter(cluster, cache, Metrics())


async def write(children: ChildWriter, *manifests: Object) -> WriteResult:
    result = WriteResult()
    await children.write(KEY, OWNER, manifests, result)
    return result


SERVICE = manifest("Service", "s", spec={"port": 80})


async def test_what_did_not_change_is_not_sent_again(children: ChildWriter, table: Table) -> None:
    await write(children, SERVICE)
    assert table.applied() == ["s"]
    await write(children, SERVICE)
    assert table.calls == []
    await write(children, manifest("Service", "s", spec={"port": 81}))
    assert table.applied() == ["s"]


async def test_pods_come_after_what_they_mount_and_bindings_after_roles(children: ChildWriter, table: Table) -> None:
    kinds = {"Deployment": "4", "RoleBinding": "3", "ConfigMap": "2", "ControllerRevision": "1", "PodMonitor": "5"}
    manifests = [manifest(kind, name) for kind, name in kinds.items()]
    manifests[-1]["apiVersion"] = "monitoring.coreos.com/v1"
    await write(children, *manifests)
    assert table.applied() == ["1", "2", "3", "4", "5"]


async def test_an_object_of_another_owner_is_not_touched(children: ChildWriter, table: Table) -> None:
    theirs = manifest("Service", "s", spec={"port": 5})
    theirs["metadata"] |= {"ownerReferences": [{"uid": "other", "controller": True}], "labels": {}}
    table.store(theirs)
    written = await write(children, SERVICE)
    assert [problem.reason for problem in written.problems] == [CHILD_NAME_TAKEN]
    assert table.applied() == []
    assert written.again_in is not None


async def test_an_object_of_ours_without_its_reference_is_taken_back(children: ChildWriter, table: Table) -> None:
    orphan = manifest("Service", "s", spec={"port": 80})
    del orphan["metadata"]["ownerReferences"]
    table.store(orphan)
    written = await write(children, SERVICE)
    assert written.problems == []
    assert table.applied() == ["s"]


async def test_drift_is_taken_back_and_counted_and_other_peoples_fields_are_no_drift(
    children: ChildWriter, table: Table
) -> None:
    await write(children, SERVICE)
    table.edit(manifest("Service", "s", spec={"port": 1}))
    written = await write(children, SERVICE)
    assert [ref.name for ref in written.repaired] == ["s"]
    table.applied()
    written = await write(children, SERVICE)
    assert (written.repaired, table.calls) == ([], [])


async def test_a_claim_that_others_have_grown_is_left_as_it_is(children: ChildWriter, table: Table) -> None:
    """The API server refuses to shrink it, and a refused child would keep new pods away."""

    def claim(size: str) -> Object:
        return manifest("PersistentVolumeClaim", "c", spec={"resources": {"requests": {"storage": size}}})

    await write(children, claim("64Gi"))
    assert table.applied() == ["c"]
    table.edit(claim("128Gi"))
    written = await write(children, claim("64Gi"))
    assert (written.problems, written.repaired, table.calls) == ([], [], [])


async def test_a_contested_child_is_repaired_with_growing_pauses_and_reported_until_it_was_left_alone_for_a_while(
    children: ChildWriter, table: Table, clock: Time
) -> None:
    await write(children, SERVICE)
    pauses, reported = [], []
    for round_ in range(2 * module.IMMEDIATE_REPAIRS):
        table.edit(manifest("Service", "s", spec={"port": 100 + round_}))
        written = await write(children, SERVICE)
        reported.append([problem.reason for problem in written.problems])
        if not written.repaired:
            assert written.again_in is not None
            pauses.append(written.again_in)
            clock.now += written.again_in
            written = await write(children, SERVICE)
            assert written.repaired
            reported.append([problem.reason for problem in written.problems])
        in_order = await write(children, SERVICE)
        reported.append([problem.reason for problem in in_order.problems])
    assert pauses == sorted(pauses)
    assert len(pauses) >= 5
    assert pauses[-1] <= module.LONGEST_PAUSE
    assert reported == sorted(reported), "once reported, it stays reported"
    assert (reported[0], reported[-1]) == ([], [CHILD_CONTESTED])
    assert in_order.again_in is not None, "a later reconcile clears it"
    clock.now += in_order.again_in
    assert (await write(children, SERVICE)).problems == []
    table.edit(manifest("Service", "s", spec={"port": 7}))
    written = await write(children, SERVICE)
    assert (len(written.repaired), written.problems) == (1, []), "an old fight is forgotten"


async def test_a_refused_manifest_is_not_sent_again_until_it_changes_or_a_minute_passed(
    children: ChildWriter, table: Table, clock: Time
) -> None:
    table.fail["s"] = Refused("quota", status=403)
    other = manifest("ConfigMap", "c")
    written = await write(children, SERVICE, other)
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert sorted(table.applied()) == ["c", "s"]
    written = await write(children, SERVICE, other)
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert written.again_in is not None
    assert table.applied() == []
    await write(children, manifest("Service", "s", spec={"port": 2}))
    assert table.applied() == ["s"]
    clock.now += module.REFUSED_FOR + 1
    del table.fail["s"]
    written = await write(children, SERVICE)
    assert (written.problems, table.applied()) == ([], ["s"])


async def test_a_list_that_others_made_invalid_is_taken_back_as_a_whole(children: ChildWriter, table: Table) -> None:
    await write(children, SERVICE)
    table.edit(manifest("Service", "s", spec={"port": 1}))
    table.fail["s"] = Refused("duplicate port name", status=422)
    written = await write(children, SERVICE)
    assert [ref.name for ref in written.repaired] == ["s"]
    assert ("merge", "Service", "s") in table.calls


async def test_what_fails_keeps_its_neighbours_but_not_what_builds_on_it(children: ChildWriter, table: Table) -> None:
    table.fail["s"] = Unavailable("down")
    written = await write(children, SERVICE, manifest("ConfigMap", "c"), manifest("Deployment", "w"))
    assert [ref.name for ref, _ in written.failures] == ["s"]
    assert sorted(table.applied()) == ["c", "s"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "ServiceAccount"])
@pytest.mark.parametrize("why", ["refused", "taken"])
async def test_no_new_pod_is_made_without_its_policy_and_account_and_those_that_run_are_kept_up(
    children: ChildWriter, table: Table, kind: str, why: str
) -> None:
    guard, new, old = manifest(kind, "g"), manifest("Deployment", "new"), manifest("Deployment", "old")
    table.edit(old)
    if why == "refused":
        table.fail["g"] = Refused("quota", status=403)
    else:
        theirs = manifest(kind, "g")
        theirs["metadata"] |= {"ownerReferences": [], "labels": {}}
        table.store(theirs)
    written = await write(children, guard, new, old)
    assert [problem.kind for problem in written.problems] == [kind]
    assert [name for name in table.applied() if name != "g"] == ["old"]
    assert written.again_in is not None


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [("Deployment", False), ("ConfigMap", False), ("PodMonitor", True), ("HorizontalPodAutoscaler", True)],
)
async def test_what_runs_stays_only_while_something_that_pods_need_cannot_be_written(
    children: ChildWriter, table: Table, kind: str, replaced: bool
) -> None:
    table.fail["x"] = Refused("quota", status=403)
    written = await write(children, manifest(kind, "x"))
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert written.may_prune is replaced


def test_a_contested_child_keeps_nothing_from_being_taken_away() -> None:
    contested = Problem(CHILD_CONTESTED, "Deployment", "w", "")
    assert WriteResult([contested]).may_prune
    failure = (Ref.of(SERVICE), Unavailable("down"))
    assert not WriteResult(failures=[failure]).may_prune


async def test_pruning_deletes_exactly_what_was_seen(children: ChildWriter, table: Table) -> None:
    live = table.store(SERVICE)
    written = WriteResult()
    await children.prune(KEY, {Ref.of(SERVICE): "another"}, written)
    assert table.objects
    await children.prune(KEY, {Ref.of(SERVICE): live["metadata"]["uid"]}, written)
    assert not table.objects
    assert not written.failures
