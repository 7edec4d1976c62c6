"""A pool from one engine to three and back under load, and the end of a deployment: nothing of it stays."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
from cluster.access import Access
from cluster.resources import apply, delete, is_done
from e2e.conftest import Record
from e2e.deploying import READY_SECONDS, RESTRICTED, Deployed, deploy, example, make_model, wait_or_dump
from e2e.load import MEASURED, Traffic, load
from waiting import wait_for

from mmrouter_operator.model.kinds import RESOURCE

STEP_MS = 20
"""Of an engine: slow enough that answers are under way when a pod goes."""
CLIENTS = 6
LONG_TOKENS, LONG_CLIENTS = 200, 3
"""Answers that take 4 s."""
LASTS_SECONDS = 2.0
"""Oldest age of a streaming answer at the moment when the pool shrinks."""
SAME = 0.05
"""Hit ratios as near as that are the same."""
NOT_OURS = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
"""What every namespace has."""
OF_ITS_OWN = {"Event", "PodMetrics"}
"""Kinds that are records of what was, and not objects of a deployment."""


def body(replicas: int) -> dict[str, Any]:
    made = example()
    made["spec"]["engine"]["args"] = [f"--sim-decode-ms={STEP_MS}"]
    made["spec"]["frontend"]["replicas"] = 1
    made["spec"]["pools"][0]["replicas"] = replicas
    made["spec"]["pools"][0]["updates"] = {"drainSeconds": 30}
    return made


@pytest.fixture(scope="module")
def mine(operated: Access) -> Iterator[Deployed]:
    """A deployment of one engine and one frontend, which the last test deletes."""
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        yield deploy(operated, namespace, body(1))


def scaled(mine: Deployed, replicas: int) -> float:
    """Scale the pool and wait until the deployment is Ready with so many pods; return the seconds that it took."""
    began = time.monotonic()
    generation = apply(mine.cluster, mine.namespace, body(replicas))["metadata"]["generation"]
    selector = f"mmrouter.io/deployment={mine.name},mmrouter.io/role=worker"

    def settled() -> bool:
        path = f"/api/v1/namespaces/{mine.namespace}/pods"
        pods = mine.cluster.request("GET", path, labelSelector=selector).raise_for_status().json()["items"]
        return len(pods) == replicas and is_done(mine.cluster, mine.namespace, mine.name, generation)

    wait_or_dump(mine.cluster, mine.namespace, settled, READY_SECONDS, f"the pool has {replicas} pods and is Ready")
    return round(time.monotonic() - began, 1)


def test_a_pool_grows_and_shrinks_under_load_and_nothing_is_lost(mine: Deployed, record: Record) -> None:
    names = {pod["metadata"]["name"] for pod in mine.pods("worker")}
    with load(mine, clients=CLIENTS, pause=0.1, long_tokens=LONG_TOKENS, long_clients=LONG_CLIENTS) as traffic:
        traffic.go_on()
        before = traffic.hit_ratio(traffic.go_on(2 * MEASURED))
        up = scaled(mine, 3)
        grown = {pod["metadata"]["name"] for pod in mine.pods("worker")}
        wait_for(lambda: grown <= traffic.workers(), 60, "all three engines answer")
        # Two of the three go, so of two engines with a long answer one does.
        wait_for(lambda: len(lasting(traffic)) > 1, 60, "long answers are under way at two engines")
        shrunk = time.time()
        down = scaled(mine, 1)
        since = time.time()
        after = traffic.recovered(before - SAME)
    record("pool 1 -> 3 -> 1 under load", told(traffic, {"before": before, "after": after}, up, down))
    assert not traffic.failed, traffic
    traffic.assert_exact()
    (left,) = {pod["metadata"]["name"] for pod in mine.pods("worker")}
    assert names < grown
    assert [each for each in traffic.sent if each.started < shrunk < each.ended and each.worker in grown - {left}]
    assert traffic.workers(since) == {left}
    assert after > before - SAME


def lasting(traffic: Traffic) -> set[str]:
    """Return the engines that have a long answer under way, which has just begun."""
    streams = [each for each in list(traffic.streams.values()) if each.client >= CLIENTS]
    return {each.worker for each in streams if time.time() - each.started < LASTS_SECONDS}


def told(traffic: Traffic, ratios: dict[str, float], up: float, down: float) -> str:
    rows = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
    return f"{len(traffic.sent)} requests, {len(traffic.failed)} failed; hit ratio {rows}; up {up} s, down {down} s"


def test_of_a_deleted_deployment_no_object_of_any_kind_stays(mine: Deployed, record: Record) -> None:
    kinds = listable(mine.cluster)
    assert {"Pod", "Secret", "Lease", "EndpointSlice", "ControllerRevision"} <= {kind for _, kind in kinds}
    made = {kind for kind, _ in everything(mine, kinds)} - {"ConfigMap"}
    assert {"Deployment", "ReplicaSet", "Pod", "Service", "EndpointSlice", "Secret", "NetworkPolicy"} <= made
    began = time.monotonic()
    delete(mine.cluster, RESOURCE, mine.namespace, mine.name)
    kept = NOT_OURS | {("ConfigMap", "tiny-qwen2-vl")}  # the user's own
    try:
        wait_for(lambda: everything(mine, kinds) == kept, READY_SECONDS, "only what is not ours is left", every=0.5)
    except TimeoutError as error:
        raise AssertionError(f"{error}: {everything(mine, kinds) ^ kept}") from error
    record("nothing is left after a delete, s", round(time.monotonic() - began, 1))


def listable(cluster: Access) -> list[tuple[str, str]]:
    """Return (path of the group's version and plural, kind) of every namespaced kind that the API server lists."""
    groups = cluster.request("GET", "/apis").raise_for_status().json()["groups"]
    versions = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
    found = []
    for version in versions:
        for each in cluster.request("GET", version).raise_for_status().json()["resources"]:
            whole = each["namespaced"] and "list" in each["verbs"] and "/" not in each["name"]
            if whole and each["kind"] not in OF_ITS_OWN:
                found.append((f"{version} {each['name']}", each["kind"]))
    return found


def everything(mine: Deployed, kinds: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return (kind, name) of all objects of the namespace, of any owner and with any labels."""
    found = set()
    for where, kind in kinds:
        version, _, plural = where.partition(" ")
        answer = mine.cluster.request("GET", f"{version}/namespaces/{mine.namespace}/{plural}").raise_for_status()
        found |= {(kind, item["metadata"]["name"]) for item in answer.json()["items"]}
    return found
