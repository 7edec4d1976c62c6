"""The cache is filled by watches of children and by kopf's watch of the resources, which a comparison checks."""

import asyncio
from typing import Any

import pytest
from unit.operator.fake_cluster import KEY, Table, manifest

from mmrouter_kube.list_watch import RefusedError
from mmrouter_operator.cluster import resource_watch
from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.client import ApiError, Refused
from mmrouter_operator.cluster.resource_watch import TOLERATED, Comparison
from mmrouter_operator.cluster.watches import ChildWatches, KindListener, WatchError
from mmrouter_operator.model.kinds import RESOURCE, Ref
from mmrouter_operator.model.snapshot import Key

SERVICE = {**manifest("Service", "s"), "spec": {"ports": []}}
DEPLOYMENT = {**manifest(RESOURCE, "d"), "apiVersion": "mmrouter.io/v1alpha1"}


@pytest.fixture
def cache() -> WatchCache:
    return WatchCache()


@pytest.fixture
def table(cache: WatchCache) -> Table:
    return Table(cache)


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


@pytest.mark.parametrize("status", [400, 405])
def test_a_refusal_that_lasts_ends_the_watch(cache: WatchCache, status: int) -> None:
    made = Listened(cache)
    with pytest.raises(WatchError, match="Service cannot be listed"):
        made.listener.failed("refused", RefusedError(status, "no"))


@pytest.mark.parametrize("status", [401, 403, 404, 410, 429, 500])
def test_a_refusal_that_may_pass_is_repeated(cache: WatchCache, status: int) -> None:
    made = Listened(cache)
    made.list()
    error = RefusedError(status, "no")
    made.listener.failed(error.reason, error)
    assert "Service cannot be watched in all namespaces" in made.listener.trouble
    made.listener.connected()
    assert made.listener.trouble == ""


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
    monkeypatch.setattr(resource_watch, "FIRST", 0.001)
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
