"""The cache is filled by watches of children and by kopf's watch of the resources, which a comparison checks."""

import asyncio
import base64
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.operator.fake_cluster import KEY, Table, manifest

from mmrouter_kube.list_watch import RefusedError
from mmrouter_operator.cluster.cache import WatchCache, content_of
from mmrouter_operator.cluster.client import ApiError, Refused
from mmrouter_operator.cluster.custom_resource_watch import TOLERATED, Comparison
from mmrouter_operator.cluster.watches import ChildWatches, KindListener, WatchError
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.kinds import RESOURCE, Ref
from mmrouter_operator.model.snapshot import Key

SERVICE = {**manifest("Service", "s"), "spec": {"ports": []}}
DEPLOYMENT = {**manifest(RESOURCE, "d"), "apiVersion": "mmrouter.io/v1alpha1"}


PASSING = (401, 403, 404, 410, 429, 500)


class Listened:
    """A listener of Services with the keys that it reported."""

    def __init__(self, cache: WatchCache, namespace: str = "") -> None:
        self.changed: list[Key] = []
        self.completed = 0
        self.listener = KindListener("Service", namespace, cache, self.changed.append, self._on_listed)

    def _on_listed(self) -> None:
        self.completed += 1

    def list(self, *objects: dict[str, Any]) -> None:
        self.listener.list_started()
        self.listener.listed(objects)
        self.listener.list_complete(frozenset(obj["metadata"]["uid"] for obj in objects))


def test_a_list_replaces_what_is_gone_and_reports_it(table: Table, cache: WatchCache) -> None:
    made = Listened(cache)
    made.list(table.store(SERVICE))
    assert (made.completed, made.changed) == (1, [KEY])
    assert set(cache.children(KEY)) == {("Service", "s")}
    made.list()
    assert cache.children(KEY) == {}
    assert (made.completed, made.changed) == (1, [KEY, KEY])


def test_an_object_that_is_written_during_a_list_stays(table: Table, cache: WatchCache) -> None:
    made = Listened(cache)
    made.listener.list_started()
    cache.put("Service", table.store(SERVICE))
    made.listener.list_complete(frozenset())
    assert set(cache.children(KEY)) == {("Service", "s")}


def test_a_list_of_one_namespace_says_nothing_of_others(table: Table, cache: WatchCache) -> None:
    cache.put("Service", table.store(SERVICE))
    Listened(cache, "elsewhere").list()
    assert set(cache.children(KEY)) == {("Service", "s")}


def test_events_add_change_and_remove(table: Table, cache: WatchCache) -> None:
    made = Listened(cache)
    live = table.store(SERVICE)
    made.listener.event("ADDED", live)
    made.listener.event("MODIFIED", table.store({**SERVICE, "spec": {"ports": [1]}}))
    made.listener.event("DELETED", table.store(SERVICE))
    assert made.changed == [KEY] * 3
    assert cache.children(KEY) == {}


@pytest.mark.parametrize(("status", "lasts"), [(400, True), (405, True), *((s, False) for s in PASSING)])
def test_a_refusal_that_lasts_ends_the_watch_and_one_that_may_pass_is_repeated(
    cache: WatchCache, status: int, lasts: bool
) -> None:
    made = Listened(cache)
    listener = made.listener
    if not lasts:
        made.list()
    error = RefusedError(status, "no")
    with pytest.raises(WatchError, match="Service cannot be listed") if lasts else nullcontext():
        listener.failed(error.reason, error)
    assert ("Service cannot be watched in all namespaces" in listener.trouble) is not lasts
    listener.connected()
    assert listener.trouble == ""


def test_a_failure_is_logged_once(cache: WatchCache, caplog: pytest.LogCaptureFixture) -> None:
    made = Listened(cache)
    for _ in range(3):
        made.listener.failed("unreachable", OSError("no route"))
    assert len(caplog.records) == 1


def test_children_count_as_listed_when_every_kind_is_and_the_missing_ones_are_named(cache: WatchCache) -> None:
    watches = ChildWatches(lambda: None, cache, ["Service", "Pod"], [""], lambda _: None)  # type: ignore[arg-type, return-value]
    assert not watches.listed.is_set()
    assert watches.trouble == "not listed yet: Pod, Service"


def comparison(table: Table, cache: WatchCache, changed: list[Key]) -> Comparison:
    cluster: Any = table
    return Comparison(cluster, cache, [""], changed.append)


async def test_a_resource_that_was_deleted_without_an_event_is_found(table: Table, cache: WatchCache) -> None:
    table.edit(DEPLOYMENT)
    changed: list[Key] = []
    made = comparison(table, cache, changed)
    await made.compare()
    assert made.filled.is_set()
    assert changed == []
    table.objects.clear()
    await made.compare()
    assert changed == [KEY]
    assert cache.resource(KEY) is None


async def test_the_cache_is_filled_when_nothing_is_missing_and_a_watch_that_stays_behind_is_dead(
    table: Table, cache: WatchCache
) -> None:
    made = comparison(table, cache, [])
    unseen = table.store(DEPLOYMENT)
    await made.compare()
    assert not made.filled.is_set()
    assert RESOURCE in made.trouble
    cache.put(RESOURCE, unseen)
    await made.compare()
    assert made.filled.is_set()
    other = {**DEPLOYMENT, "metadata": {**DEPLOYMENT["metadata"], "name": "e"}}
    table.store(other)
    for _ in range(TOLERATED - 1):
        await made.compare()
        assert not made.watch_is_dead
    await made.compare()
    assert made.watch_is_dead
    cache.put(RESOURCE, table.objects[Ref.of(other)])
    await made.compare()
    assert not made.watch_is_dead


async def test_resources_that_may_not_be_listed_are_reported_once_and_tried_again(
    table: Table, cache: WatchCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = comparison(table, cache, [])
    tries = 0

    async def forbidden(kind: str, namespace: str, selector: str) -> list[Any]:
        nonlocal tries
        tries += 1
        raise Refused("mmrouterdeployments is forbidden", status=403)

    monkeypatch.setattr(table, "list", forbidden)
    monkeypatch.setattr("mmrouter_operator.cluster.custom_resource_watch.FIRST", 0.001)
    task = asyncio.create_task(made.run())
    async with asyncio.timeout(30):
        while tries < 5:
            await asyncio.sleep(0.001)
    task.cancel()
    assert f"{RESOURCE} cannot be listed in all namespaces: mmrouterdeployments is forbidden" in made.trouble
    assert len(caplog.records) == 1
    with pytest.raises(ApiError):
        await made.compare()
    monkeypatch.undo()
    await made.compare()
    assert made.trouble == ""


def obj(kind: str, name: str, uid: str, version: int, **more: Any) -> dict[str, Any]:
    made: dict[str, Any] = manifest(kind, name, **more)
    made["metadata"] |= {"uid": uid, "resourceVersion": str(version)}
    return made


def test_a_deployment_is_known_by_its_resource_and_gone_with_it(cache: WatchCache) -> None:
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 1))
    assert cache.deployments() == []
    resource = obj(RESOURCE, "d", "r", 1, status={"phase": "Ready"})
    resource["metadata"] |= TOUCHED
    assert cache.put(RESOURCE, resource) == (KEY,)
    assert cache.deployments() == [KEY]
    found = cache.resource(KEY)
    assert found is not None
    assert found["status"] == {"phase": "Ready"}
    assert "managedFields" not in found["metadata"]
    assert cache.remove(RESOURCE, "r") == (KEY,)
    assert cache.deployments() == []
    assert cache.resource(KEY) is None


TOUCHED = {"managedFields": [{"manager": "x", "fieldsV1": {}}]}
COUNTED = {"annotations": {"deployment.kubernetes.io/revision": "1"}}


@pytest.mark.parametrize(
    ("kind", "metadata", "fields", "is_change"),
    [
        ("Service", TOUCHED, {}, False),
        ("Service", {}, {"spec": {"replicas": 3}}, True),
        ("Deployment", COUNTED, {}, False),
        ("Deployment", {}, {"status": {"readyReplicas": 1}}, True),
        (RESOURCE, TOUCHED, {}, False),
        (RESOURCE, {}, {"status": {"phase": "Ready"}}, True),
    ],
)
def test_what_servers_and_controllers_count_is_no_change_and_a_status_is_one(
    cache: WatchCache, kind: str, metadata: dict[str, Any], fields: dict[str, Any], is_change: bool
) -> None:
    assert cache.put(kind, obj(kind, "d", "1", 1, spec={"replicas": 2})) == (KEY,)
    content = cache.content(KEY, kind, "d")
    again = obj(kind, "d", "1", 2, **{"spec": {"replicas": 2}, **fields})
    again["metadata"] |= metadata
    assert cache.put(kind, again) == ((KEY,) if is_change else ())
    assert (cache.content(KEY, kind, "d") == content) is ("spec" not in fields), "the status is no content of a child"


@pytest.mark.parametrize(("version", "is_news"), [(8, False), (10, True)])
def test_only_something_newer_brings_an_object_back_after_the_news_of_its_end(
    cache: WatchCache, version: int, is_news: bool
) -> None:
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    cache.remove("ConfigMap", "1", "9")
    assert cache.put("ConfigMap", obj("ConfigMap", "c", "1", version)) == ((KEY,) if is_news else ())
    assert (("ConfigMap", "c") in cache.children(KEY)) is is_news


@pytest.mark.parametrize(("label", "woken"), [({}, {KEY}), ({"mmrouter.io/deployment": "e"}, {KEY, ("n", "e")})])
def test_a_child_that_lost_its_label_to_none_or_another_deployment_wakes_all_that_had_it(
    cache: WatchCache, label: dict[str, str], woken: set[Key]
) -> None:
    cache.put("ConfigMap", obj("ConfigMap", "c", "1", 5))
    moved = obj("ConfigMap", "c", "1", 6)
    del moved["metadata"]["labels"]["mmrouter.io/deployment"]
    moved["metadata"]["labels"] |= label
    assert set(cache.put("ConfigMap", moved)) == woken
    assert cache.children(KEY) == {}


def test_a_successor_of_the_same_name_outlives_the_news_of_its_predecessors_end(cache: WatchCache) -> None:
    cache.put("ConfigMap", obj("ConfigMap", "c", "old", 5))
    cache.put("ConfigMap", obj("ConfigMap", "c", "new", 7))
    cache.remove("ConfigMap", "old", "6")
    assert cache.children(KEY)["ConfigMap", "c"].uid == "new"


@given(order=st.permutations(range(1, 8)))
def test_the_newest_version_stays_in_whatever_order_they_arrive(order: list[int]) -> None:
    cache = WatchCache()
    for version in order:
        cache.put("ConfigMap", obj("ConfigMap", "c", "1", version, data={"v": str(version)}))
    assert cache.children(KEY)["ConfigMap", "c"].resource_version == "7"
    assert cache.content(KEY, "ConfigMap", "c") == content_of(obj("ConfigMap", "c", "1", 7, data={"v": "7"}))


def test_secrets_are_read_or_their_fault_is_named_and_never_shown(cache: WatchCache) -> None:
    made = new_secret_data()
    data = {name: base64.b64encode(value).decode() for name, value in made.entries().items()}
    cache.put("Secret", obj("Secret", "d-secrets", "1", 1, data=data))
    assert cache.secret(KEY, "d-secrets") == made
    assert cache.secret(KEY, "other") is None
    for entry, value, word in [
        ("identity.key", base64.b64encode(b"short").decode(), "identity.key"),
        ("engine.key", None, "engine.key"),
        ("sidecar.curve.secret", "???", "sidecar.curve.secret"),
        ("control.token", "", "control.token"),
    ]:
        broken = {**data, entry: value} if value is not None else {k: v for k, v in data.items() if k != entry}
        version = int(cache.children(KEY)["Secret", "d-secrets"].resource_version) + 1
        cache.put("Secret", obj("Secret", "d-secrets", "1", version, data=broken))
        fault = cache.secret(KEY, "d-secrets")
        assert isinstance(fault, str)
        assert word in fault
        assert "short" not in fault


def test_revisions_are_the_owners_in_order_with_what_they_keep(cache: WatchCache) -> None:
    for number in (3, 1, 2):
        kept = obj("ControllerRevision", f"d-{number}", str(number), number, revision=number, data={"n": number})
        cache.put("ControllerRevision", kept)
    foreign = obj("ControllerRevision", "d-9", "9", 9, revision=9, data={})
    foreign["metadata"]["ownerReferences"][0]["uid"] = "other"
    cache.put("ControllerRevision", foreign)
    assert [(view.number, view.data) for view in cache.revisions(KEY, "r")] == [(n, {"n": n}) for n in (1, 2, 3)]
