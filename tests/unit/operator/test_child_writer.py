"""Writing children: only what changed, nothing of others, in order. The cluster is a table with the server's rules."""

import asyncio
from typing import Any

import pytest
from unit.operator.fake_cluster import KEY, OWNER, Table, manifest

from mmrouter_operator.cluster import cache_audit as audit_module
from mmrouter_operator.cluster import child_writer as module
from mmrouter_operator.cluster.cache import Cache
from mmrouter_operator.cluster.cache_audit import TOLERATED, Audit
from mmrouter_operator.cluster.child_writer import Children, Written
from mmrouter_operator.cluster.client import ApiError, Refused, Unavailable
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.problems import CHILD_CONTESTED, CHILD_NAME_TAKEN, CHILD_REFUSED, Problem
from mmrouter_operator.model.refs import Ref
from mmrouter_operator.model.snapshot import Key


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(module, "boot_time", one)
    return one


@pytest.fixture
def cache() -> Cache:
    return Cache()


@pytest.fixture
def table(cache: Cache) -> Table:
    return Table(cache)


@pytest.fixture
def children(table: Table, cache: Cache, clock: Clock) -> Children:
    cluster: Any = table
    return Children(cluster, cache, Metrics())


SERVICE = manifest("Service", "s", spec={"port": 80})


async def test_what_did_not_change_is_not_sent_again(children: Children, table: Table) -> None:
    await children.write(KEY, OWNER, [SERVICE])
    assert table.applied() == ["s"]
    await children.write(KEY, OWNER, [SERVICE])
    assert table.calls == []
    await children.write(KEY, OWNER, [manifest("Service", "s", spec={"port": 81})])
    assert table.applied() == ["s"]


async def test_pods_come_after_what_they_mount_and_bindings_after_roles(children: Children, table: Table) -> None:
    names = [
        ("Deployment", "4"),
        ("RoleBinding", "3"),
        ("ConfigMap", "2"),
        ("ControllerRevision", "1"),
        ("PodMonitor", "5"),
    ]
    manifests = [manifest(kind, name) for kind, name in names]
    manifests[-1]["apiVersion"] = "monitoring.coreos.com/v1"
    await children.write(KEY, OWNER, manifests)
    assert table.applied() == ["1", "2", "3", "4", "5"]


async def test_somebody_elses_object_is_not_touched(children: Children, table: Table) -> None:
    theirs = manifest("Service", "s", spec={"port": 5})
    theirs["metadata"] |= {"ownerReferences": [{"uid": "other", "controller": True}], "labels": {}}
    table.store(theirs)
    written = await children.write(KEY, OWNER, [SERVICE])
    assert [problem.reason for problem in written.problems] == [CHILD_NAME_TAKEN]
    assert table.applied() == []
    assert written.again_in is not None


async def test_an_object_of_ours_without_its_reference_is_taken_back(children: Children, table: Table) -> None:
    orphan = manifest("Service", "s", spec={"port": 80})
    del orphan["metadata"]["ownerReferences"]
    table.store(orphan)
    written = await children.write(KEY, OWNER, [SERVICE])
    assert written.problems == []
    assert table.applied() == ["s"]


async def test_drift_is_taken_back_and_counted_and_other_peoples_fields_are_no_drift(
    children: Children, table: Table
) -> None:
    await children.write(KEY, OWNER, [SERVICE])
    table.edit(manifest("Service", "s", spec={"port": 1}))
    written = await children.write(KEY, OWNER, [SERVICE])
    assert [ref.name for ref in written.repaired] == ["s"]
    table.applied()
    written = await children.write(KEY, OWNER, [SERVICE])
    assert (written.repaired, table.calls) == ([], [])


async def test_a_child_that_others_fight_over_is_repaired_with_growing_pauses(
    children: Children, table: Table, clock: Clock
) -> None:
    await children.write(KEY, OWNER, [SERVICE])
    pauses = []
    for round_ in range(20):
        table.edit(manifest("Service", "s", spec={"port": 100 + round_}))
        written = await children.write(KEY, OWNER, [SERVICE])
        if not written.repaired:
            assert written.again_in is not None
            assert [problem.reason for problem in written.problems] == [CHILD_CONTESTED]
            pauses.append(written.again_in)
            clock.now += written.again_in
            assert (await children.write(KEY, OWNER, [SERVICE])).repaired
    assert pauses == sorted(pauses)
    assert len(pauses) >= 5
    assert pauses[-1] <= module.LONGEST_PAUSE
    clock.now += 2 * module.PATIENCE
    table.edit(manifest("Service", "s", spec={"port": 7}))
    assert (await children.write(KEY, OWNER, [SERVICE])).repaired, "an old fight is forgotten"


async def test_a_contested_child_is_told_without_a_break_until_it_was_left_alone_for_a_while(
    children: Children, table: Table, clock: Clock
) -> None:
    await children.write(KEY, OWNER, [SERVICE])
    told = []
    for round_ in range(2 * module.IMMEDIATE_REPAIRS):
        table.edit(manifest("Service", "s", spec={"port": 100 + round_}))
        written = await children.write(KEY, OWNER, [SERVICE])
        told.append(bool(written.problems))
        if not written.repaired:
            clock.now += written.again_in or 0.0
            written = await children.write(KEY, OWNER, [SERVICE])
            assert written.repaired
            told.append(bool(written.problems))
        in_order = await children.write(KEY, OWNER, [SERVICE])
        told.append(bool(in_order.problems))
    assert told == sorted(told), "once told, it stays told"
    assert told[-1]
    assert in_order.again_in is not None, "somebody comes back to take it off"
    clock.now += in_order.again_in
    assert (await children.write(KEY, OWNER, [SERVICE])).problems == []


async def test_a_refused_manifest_is_not_sent_again_until_it_changes_or_a_minute_passed(
    children: Children, table: Table, clock: Clock
) -> None:
    table.fail["s"] = Refused("quota", status=403)
    other = manifest("ConfigMap", "c")
    written = await children.write(KEY, OWNER, [SERVICE, other])
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert sorted(table.applied()) == ["c", "s"]
    written = await children.write(KEY, OWNER, [SERVICE, other])
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert written.again_in is not None
    assert table.applied() == []
    await children.write(KEY, OWNER, [manifest("Service", "s", spec={"port": 2})])
    assert table.applied() == ["s"]
    clock.now += module.REFUSED_FOR + 1
    del table.fail["s"]
    written = await children.write(KEY, OWNER, [SERVICE])
    assert (written.problems, table.applied()) == ([], ["s"])


async def test_a_list_that_others_made_invalid_is_taken_back_as_a_whole(children: Children, table: Table) -> None:
    await children.write(KEY, OWNER, [SERVICE])
    table.edit(manifest("Service", "s", spec={"port": 1}))
    table.fail["s"] = Refused("duplicate port name", status=422)
    written = await children.write(KEY, OWNER, [SERVICE])
    assert [ref.name for ref in written.repaired] == ["s"]
    assert ("merge", "Service", "s") in table.calls


async def test_what_fails_keeps_its_neighbours_but_not_what_builds_on_it(children: Children, table: Table) -> None:
    table.fail["s"] = Unavailable("down")
    written = await children.write(KEY, OWNER, [SERVICE, manifest("ConfigMap", "c"), manifest("Deployment", "w")])
    assert [ref.name for ref, _ in written.failures] == ["s"]
    assert sorted(table.applied()) == ["c", "s"]


@pytest.mark.parametrize("kind", ["NetworkPolicy", "ServiceAccount"])
@pytest.mark.parametrize("why", ["refused", "taken"])
async def test_no_new_pod_is_made_without_its_policy_and_account_and_those_that_run_are_kept_up(
    children: Children, table: Table, kind: str, why: str
) -> None:
    guard, new, old = manifest(kind, "g"), manifest("Deployment", "new"), manifest("Deployment", "old")
    table.edit(old)
    if why == "refused":
        table.fail["g"] = Refused("quota", status=403)
    else:
        theirs = manifest(kind, "g")
        theirs["metadata"] |= {"ownerReferences": [], "labels": {}}
        table.store(theirs)
    written = await children.write(KEY, OWNER, [guard, new, old])
    assert [problem.kind for problem in written.problems] == [kind]
    assert [name for name in table.applied() if name != "g"] == ["old"]
    assert written.again_in is not None


@pytest.mark.parametrize(
    ("kind", "replaced"), [("Deployment", False), ("ConfigMap", False), ("PodMonitor", True), ("Widget", True)]
)
async def test_what_runs_stays_only_while_something_that_pods_need_cannot_be_written(
    children: Children, table: Table, kind: str, replaced: bool
) -> None:
    table.fail["x"] = Refused("quota", status=403)
    written = await children.write(KEY, OWNER, [manifest(kind, "x")])
    assert [problem.reason for problem in written.problems] == [CHILD_REFUSED]
    assert written.replaced is replaced


def test_a_contested_child_keeps_nothing_from_being_taken_away() -> None:
    contested = Problem(CHILD_CONTESTED, "Deployment", "w", "")
    assert Written([contested], [], []).replaced
    failure = (Ref.of(SERVICE), Unavailable("down"))
    assert not Written([], [], [], failures=[failure]).replaced


async def test_pruning_deletes_exactly_what_was_seen(children: Children, table: Table) -> None:
    live = table.store(SERVICE)
    written = Written([], [], [])
    await children.prune(KEY, {Ref.of(SERVICE): "another"}, written)
    assert table.objects
    await children.prune(KEY, {Ref.of(SERVICE): live["metadata"]["uid"]}, written)
    assert not table.objects
    assert not written.failures


async def test_what_went_away_unnoticed_is_found(table: Table, cache: Cache) -> None:
    table.edit(SERVICE)
    woken: list[Key] = []
    cluster: Any = table
    audit = Audit(cluster, cache, ["Service"], [""], woken.append)
    await audit.once()
    assert audit.filled.is_set()
    assert woken == []
    table.objects.clear()
    await audit.once()
    assert woken == [KEY]
    assert cache.children(KEY) == {}


async def test_kinds_that_cannot_be_listed_keep_nobody_from_finding_what_went_away_of_the_others(
    table: Table, cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.edit(SERVICE)
    woken: list[Key] = []
    cluster: Any = table
    audit = Audit(cluster, cache, ["Role", "Service", "Pod"], [""], woken.append)
    await audit.once()
    listing = table.list

    async def broken(kind: str, namespace: str, selector: str) -> list[Any]:
        if kind != "Service":
            raise Unavailable(f"no {kind} today", status=500)
        return await listing(kind, namespace, selector)

    monkeypatch.setattr(table, "list", broken)
    table.objects.clear()
    with pytest.raises(ApiError, match="Role cannot be listed in all namespaces: no Role today"):
        await audit.once()
    assert woken == [KEY]


async def test_a_kind_that_may_not_be_listed_is_named_and_told_once_with_growing_pauses(
    table: Table, cache: Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster: Any = table
    audit = Audit(cluster, cache, ["Service", "Pod"], [""], lambda _: None)

    async def forbidden(kind: str, namespace: str, selector: str) -> list[Any]:
        if kind == "Pod":
            raise Refused("pods is forbidden", status=403)
        return []

    monkeypatch.setattr(table, "list", forbidden)
    monkeypatch.setattr(audit_module, "FIRST", 0.001)
    tries = []
    pause = audit._pause
    assert pause(10_000) <= audit_module.LONGEST_PAUSE

    def seen(failures: int) -> float:
        tries.append(pause(failures))
        return pause(failures)

    monkeypatch.setattr(audit, "_pause", seen)
    task = asyncio.create_task(audit.run())
    async with asyncio.timeout(10.0):
        while len(tries) < 5:
            await asyncio.sleep(0.001)
    task.cancel()
    assert tries == sorted(set(tries))
    assert "Pod cannot be listed in all namespaces: pods is forbidden" in audit.trouble
    assert len(caplog.records) == 1
    monkeypatch.undo()
    await audit.once()
    assert audit.trouble == ""


async def test_the_cache_counts_as_filled_only_when_nothing_is_missing_and_watches_that_stay_behind_are_deaf(
    table: Table, cache: Cache
) -> None:
    unseen = table.store(SERVICE)
    cluster: Any = table
    audit = Audit(cluster, cache, ["Service"], [""], lambda _: None)
    await audit.once()
    assert not audit.filled.is_set()
    assert "Service" in audit.trouble
    cache.put("Service", unseen)
    await audit.once()
    assert audit.filled.is_set()
    table.store(manifest("Service", "t"))
    for _ in range(TOLERATED - 1):
        await audit.once()
        assert not audit.deaf
    await audit.once()
    assert audit.deaf
    cache.put("Service", table.objects[Ref.of(manifest("Service", "t"))])
    await audit.once()
    assert not audit.deaf
