"""Changes in real pods under load lose no request: rollouts, a pool from one engine to three and back, the end."""

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest
from artefacts import Record
from cluster.access import Access
from cluster.resources import apply, condition, delete, is_done
from e2e.deploying import READY_SECONDS, Deployed, deployment, example, wait_or_dump
from e2e.load import MEASURED, ROUNDS, Sent, Traffic, hit_ratio, load, router
from waiting import wait_for

from mmrouter_operator.model.kinds import RESOURCE

GATES = ("mmrouter.io/routable", "mmrouter.io/verified")
NOTICE_SECONDS = 5.0
"""From the deletion of a pod to its SIGTERM."""
STAMP_SECONDS = 1.0
"""The API server's times are whole seconds, cut off."""
STEP_MS = 20
"""Of an engine: slow enough that answers are under way when a pod goes."""
CLIENTS: dict[str, Any] = {"clients": 6, "pause": 0.1, "long_tokens": 350, "long_clients": 4}
"""A long answer takes 7 s."""
SAME = 0.05
"""Hit ratios as near as that are the same."""


@pytest.fixture(scope="module")
def mine(operated: Access) -> Iterator[Deployed]:
    with deployment(operated, body()) as made:
        yield made


def body(engine: str = "1", frontend: str = "1") -> dict[str, Any]:
    """Return the resource; other words are another environment of engines or frontends, so other pods."""
    made = example()
    made["spec"]["engine"]["args"] = [f"--sim-decode-ms={STEP_MS}"]
    made["spec"]["pools"][0]["podTemplate"] = environment("engine", engine)
    made["spec"]["frontend"]["podTemplate"] = environment("router", frontend)
    return made


def environment(container: str, word: str) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": container, "env": [{"name": "EXAMPLE", "value": word}]}]}}


class Replaced:
    """The pods of a role while others take their place. Times are seconds since 1970."""

    def __init__(self, deployed: Deployed, role: str) -> None:
        self.deployed, self.role = deployed, role
        self.old = {pod["metadata"]["name"]: pod for pod in deployed.pods(role)}
        self.deleted: dict[str, float] = {}
        self.since: dict[tuple[str, str], float] = {}
        """Pod and condition -> when that became true, as it was first seen: it may have changed since."""

    def over(self) -> bool:
        """Look; whether all old pods are gone."""
        there = {pod["metadata"]["name"]: pod for pod in self.deployed.cluster.pods(self.deployed.namespace)}
        for name, pod in there.items():
            for each in pod["status"].get("conditions") or []:
                if each["status"] == "True":
                    self.since.setdefault((name, each["type"]), moment(each["lastTransitionTime"]))
            if name in self.old and "deletionTimestamp" in pod["metadata"]:
                end = moment(pod["metadata"]["deletionTimestamp"])
                self.deleted.setdefault(name, end - pod["metadata"]["deletionGracePeriodSeconds"])
        return self.old.keys().isdisjoint(there)

    def new(self) -> dict[str, dict[str, Any]]:
        pods = {pod["metadata"]["name"]: pod for pod in self.deployed.pods(self.role)}
        assert pods.keys().isdisjoint(self.old)
        return pods


def moment(written: str) -> float:
    return datetime.fromisoformat(written).timestamp()


def rolled(mine: Deployed, changed: dict[str, Any], role: str, traffic: Traffic) -> tuple[Replaced, dict[str, float]]:
    """Apply a change under load and wait until new pods have taken the old ones' place. Return the pods, and the hit
    ratios ``before``, ``during`` and ``after``, with the ``seconds`` that it took.
    """
    pods = Replaced(mine, role)
    traffic.go_on()
    before = traffic.hit_ratio(traffic.go_on(2 * MEASURED))
    began = time.time()
    generation = apply(mine.cluster, mine.namespace, changed)["metadata"]["generation"]

    def settled() -> bool:
        return pods.over() and is_done(mine.cluster, mine.namespace, mine.name, generation)

    wait_or_dump(mine.cluster, mine.namespace, settled, READY_SECONDS, f"every {role} is replaced")
    ended = time.time()
    after = traffic.recovered(before - SAME)
    during = traffic.hit_ratio(began, ended)
    return pods, {"seconds": ended - began, "before": before, "during": during, "after": after}


def first_of(traffic: Traffic, which: Callable[[Sent], bool], wanted: float) -> float:
    """Return the hit ratio of the first requests of a kind: of so many more, from the first, until it is as wanted."""
    found = 0.0
    for count in range(MEASURED, (ROUNDS + 1) * MEASURED, MEASURED):
        wait_for(lambda count=count: sum(map(which, traffic.between())) >= count, 60, f"{count} requests are there")
        among = sorted(filter(which, traffic.between()), key=lambda sent: sent.started)[:count]
        if (found := hit_ratio(among)) > wanted:
            break
    return found


def assert_drained(pods: Replaced, traffic: Traffic, where: Callable[[Sent], str]) -> str:
    """No request went to an old pod that was about to end, and those under way there have succeeded. Tell how many
    requests were under way at an old pod when it got its SIGTERM. ``where``: the pod of a request.
    """
    outlived, under_way = 0, 0
    for sent in traffic.between():
        deleted = pods.deleted.get(where(sent))
        if deleted is None:
            continue
        assert sent.started < deleted + NOTICE_SECONDS + STAMP_SECONDS, sent
        under_way += sent.started < deleted < sent.ended
        outlived += sent.ended > deleted + NOTICE_SECONDS + STAMP_SECONDS
    assert pods.deleted.keys() == pods.old.keys()
    assert under_way
    return f"{outlived} outlived a SIGTERM"


def assert_waited(pods: Replaced, traffic: Traffic, where: Callable[[Sent], str], *conditions: str) -> None:
    """Every new pod answered, and nothing before these were true. ``where``: the pod of a request."""
    for name in pods.new():
        first = min(sent.started for sent in traffic.between() if where(sent) == name)
        waited = {condition: first - pods.since[name, condition] for condition in conditions}
        assert min(waited.values()) >= -STAMP_SECONDS, (name, waited)


def figures(traffic: Traffic, measured: dict[str, float], *more: str) -> str:
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in measured.items() if name != "seconds")
    return "; ".join([f"{len(traffic.sent)} requests, {len(traffic.failed)} failed", f"hit ratio {ratios}", *more])


def test_a_pool_is_replaced_under_load_and_nothing_is_lost(mine: Deployed, record: Record) -> None:
    with load(mine, **CLIENTS) as traffic:
        pods, measured = rolled(mine, body(engine="2"), "worker", traffic)
    outlived = assert_drained(pods, traffic, lambda sent: sent.worker)
    record("pool replaced under load", figures(traffic, measured, outlived, f"{measured['seconds']:.1f} s"))
    assert not traffic.failed, traffic
    assert measured["after"] > measured["before"] - SAME

    for pod in pods.new().values():
        since = {each["type"]: each for each in pod["status"]["conditions"]}
        assert {since[gate]["status"] for gate in GATES} == {"True"}
        assert {since[gate]["reason"] for gate in GATES} <= {"Held", "Proved"}
    assert_waited(pods, traffic, lambda sent: sent.worker, *GATES)
    # To the request itself it is said at once, not in whole seconds: a worker that is not proved is never ``exact``.
    traffic.assert_exact()
    assert condition(mine.cluster, "ExactRoutingVerified", mine.namespace, mine.name)["status"] == "True"


@pytest.mark.long_form  # tests/cluster/test_running.py replaces frontends that are processes
def test_the_frontends_are_replaced_under_load_and_forget_nothing(mine: Deployed, record: Record) -> None:
    engines = {pod["metadata"]["uid"] for pod in mine.pods("worker")}
    with load(mine, **CLIENTS) as traffic:
        pods, measured = rolled(mine, body(engine="2", frontend="2"), "frontend", traffic)
        new = pods.new()
        measured["new"] = first_of(traffic, lambda sent: bool(router(sent, new)), measured["before"] - SAME)
    outlived = assert_drained(pods, traffic, lambda sent: router(sent, pods.old))
    record("frontends replaced under load", figures(traffic, measured, outlived, f"{measured['seconds']:.1f} s"))
    assert not traffic.failed, traffic
    traffic.assert_exact()
    assert_waited(pods, traffic, lambda sent: router(sent, new), "Ready")
    # A new frontend has the whole index before it is Ready, so not even the first requests are placed worse.
    assert measured["new"] > measured["before"] - SAME
    assert measured["after"] > measured["before"] - SAME
    assert {pod["metadata"]["uid"] for pod in mine.pods("worker")} == engines


TALKING = 6
LONG_TOKENS, LONG_CLIENTS = 200, 3
"""Answers that take 4 s."""
LASTS_SECONDS = 2.0
"""Oldest age of a streaming answer at the moment when the pool shrinks."""
NOT_OURS = {("ConfigMap", "kube-root-ca.crt"), ("ServiceAccount", "default")}
OF_ITS_OWN = {"Event", "PodMetrics"}
"""Kinds that are records of what was, and not objects of a deployment."""


def sized(replicas: int) -> dict[str, Any]:
    made = body()
    made["spec"]["frontend"]["replicas"] = 1
    made["spec"]["pools"][0] |= {"replicas": replicas, "updates": {"drainSeconds": 30}}
    return made


@pytest.fixture(scope="module")
def pool(operated: Access) -> Iterator[Deployed]:
    with deployment(operated, sized(1)) as made:
        yield made


def scaled(pool: Deployed, replicas: int) -> float:
    """Scale the pool and wait until the deployment is Ready with so many pods; return the seconds that it took."""
    began = time.monotonic()
    generation = apply(pool.cluster, pool.namespace, sized(replicas))["metadata"]["generation"]

    def settled() -> bool:
        pods = pool.cluster.pods(pool.namespace, deployment=pool.name, role="worker")
        return len(pods) == replicas and is_done(pool.cluster, pool.namespace, pool.name, generation)

    wait_or_dump(pool.cluster, pool.namespace, settled, READY_SECONDS, f"the pool has {replicas} pods and is Ready")
    return round(time.monotonic() - began, 1)


def test_a_pool_grows_and_shrinks_under_load_and_nothing_is_lost(pool: Deployed, record: Record) -> None:
    names = {pod["metadata"]["name"] for pod in pool.pods("worker")}
    with load(pool, clients=TALKING, pause=0.1, long_tokens=LONG_TOKENS, long_clients=LONG_CLIENTS) as traffic:
        traffic.go_on()
        before = traffic.hit_ratio(traffic.go_on(2 * MEASURED))
        up = scaled(pool, 3)
        grown = {pod["metadata"]["name"] for pod in pool.pods("worker")}
        wait_for(lambda: grown <= traffic.workers(), 60, "all three engines answer")
        # Two of the three go, so of two engines with a long answer one does.
        wait_for(lambda: len(lasting(traffic)) > 1, 60, "long answers are under way at two engines")
        shrunk = time.time()
        down = scaled(pool, 1)
        since = time.time()
        after = traffic.recovered(before - SAME)
    measured = {"before": before, "after": after}
    record("pool 1 -> 3 -> 1 under load", figures(traffic, measured, f"up {up} s, down {down} s"))
    assert not traffic.failed, traffic
    traffic.assert_exact()
    (left,) = {pod["metadata"]["name"] for pod in pool.pods("worker")}
    assert names < grown
    assert [each for each in traffic.sent if each.started < shrunk < each.ended and each.worker in grown - {left}]
    assert traffic.workers(since) == {left}
    assert after > before - SAME


def lasting(traffic: Traffic) -> set[str]:
    """Return the engines that have a long answer under way, which has just begun."""
    streams = [each for each in list(traffic.streams.values()) if each.client >= TALKING]
    return {each.worker for each in streams if time.time() - each.started < LASTS_SECONDS}


def test_of_a_deleted_deployment_no_object_of_any_kind_stays(pool: Deployed, record: Record) -> None:
    kinds = listable(pool.cluster)
    assert {"Pod", "Secret", "Lease", "EndpointSlice", "ControllerRevision"} <= {kind for _, kind in kinds}
    made = {kind for kind, _ in everything(pool, kinds)} - {"ConfigMap"}
    assert {"Deployment", "ReplicaSet", "Pod", "Service", "EndpointSlice", "Secret", "NetworkPolicy"} <= made
    began = time.monotonic()
    delete(pool.cluster, RESOURCE, pool.namespace, pool.name)
    kept = NOT_OURS | {("ConfigMap", "tiny-qwen2-vl")}  # the user's own

    def left() -> set[tuple[str, str]]:
        return everything(pool, kinds) ^ kept

    wait_for(lambda: not left(), READY_SECONDS, "only what is not ours is left", every=0.5, known=left)
    record("nothing is left after a delete, s", round(time.monotonic() - began, 1))


def listable(cluster: Access) -> list[tuple[str, str]]:
    """Return (path of the group's version and plural, kind) of every namespaced kind that the API server lists."""
    groups = cluster.read("/apis")["groups"]
    versions = ["/api/v1", *(f"/apis/{group['preferredVersion']['groupVersion']}" for group in groups)]
    found = []
    for version in versions:
        for each in cluster.read(version)["resources"]:
            whole = each["namespaced"] and "list" in each["verbs"] and "/" not in each["name"]
            if whole and each["kind"] not in OF_ITS_OWN:
                found.append((f"{version} {each['name']}", each["kind"]))
    return found


def everything(pool: Deployed, kinds: list[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return (kind, name) of all objects of the namespace, of any owner and with any labels."""
    found = set()
    for where, kind in kinds:
        version, _, plural = where.partition(" ")
        items = pool.cluster.read(f"{version}/namespaces/{pool.namespace}/{plural}")["items"]
        found |= {(kind, item["metadata"]["name"]) for item in items}
    return found
