"""Any one process may be killed with -9 under load: no request that was not streaming fails, and the index heals.

Each container is killed once, so that the kubelet starts it again at once: the second time it would wait for 10 s.

A process is back when it answers its readiness probe with 200 for the first time. From then on the index of every
frontend becomes equal to every engine's cache; how long that takes is recorded, and ``docs/performance.md`` judges it.
A frontend that does not follow a worker is not equal to it, nor is one that still has the epoch of a killed engine; and
the new engine must hold blocks of requests that it received before the comparison ends.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from artefacts import Record
from chart.helm import NAMESPACE
from cluster.access import Access
from cluster.operators import holder
from cluster.resources import get
from e2e.deploying import Deployed, Process, container_id, deployment, example, process, process_here
from e2e.endpoints import address
from e2e.equality import Looker, Pair, Watch, assert_equal, looking, watching
from e2e.load import Sent, Traffic, load, router
from e2e.node import NAME, Node
from e2e.report import dump
from e2e.staged_deployments import ENGINE_PORT, METRICS_PORT, samples
from openai import DEFAULT_MAX_RETRIES
from waiting import answers_ok, wait_for

REPLAY_STEPS = 150
"""Batches that the engines of these tests replay: some seconds of load."""
ENGINE_ARGS = ["--max-model-len=4096", "--sim-blocks=600", f"--sim-replay-steps={REPLAY_STEPS}", "--sim-decode-ms=20"]
"""A small cache, too, which gives blocks up all the time, and answers that take long enough to be interrupted: a short
one a third of a second, so that several of them are under way at every engine most of the time."""
FORGETFUL = "forgetful"
"""A pool whose engine replays its last batch only: a frontend that was disconnected has lost events."""
CLIENTS = 9
RETRIES = 5
"""Of the client where its frontend dies. Until the kubelet has seen that, for a second or two, a share of the new
connections is refused; the retries that the client has by default are over by then. What fails of clients with the
default is a figure, and no failure of the test."""
EVERYWHERE: dict[str, Any] = {"clients": CLIENTS, "pause": 0.1, "policy": "roundRobin"}
"""Every engine has as much under way as the others: with policy kv one may get next to nothing for a minute."""
LOAD: dict[str, Any] = {**EVERYWHERE, "long_tokens": 150, "long_clients": 3}
"""The long answers take 3 s: one of them is under way at what is killed."""
LASTS_SECONDS = 1.0
"""So old an answer goes on when it is killed."""
BACK_SECONDS = 30
BUSY_SECONDS = 60
EQUAL_SECONDS = 30.0
"""Ends a hang: the index becomes equal within seconds of the first 200 of the readiness probe."""


@pytest.fixture(scope="module")
def mortal(operated: Access) -> Iterator[Deployed]:
    body = example()
    body["spec"]["engine"]["args"] = ENGINE_ARGS
    body["spec"]["pools"].append(
        {"name": FORGETFUL, "role": "worker", "replicas": 1, "accelerator": {"kind": "cpu"}}
        | {"args": ["--sim-replay-steps=1"]}
    )
    with deployment(operated, body) as made:
        yield made


@pytest.fixture
def looker(mortal: Deployed) -> Iterator[Looker]:
    """The deployment, quiet and equal, before and after a test."""
    with looking(mortal) as looker:
        assert_equal(looker, 20)
        yield looker
        assert_equal(looker)


def workers(mortal: Deployed, pool: str = "worker") -> list[dict[str, Any]]:
    return [pod for pod in mortal.pods("worker") if pod["metadata"]["labels"]["mmrouter.io/pool"] == pool]


@dataclass(frozen=True)
class Victim:
    pod: dict[str, Any]
    container: str

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def frontend(self) -> bool:
        return self.container == "router"

    def took(self, sent: Sent) -> bool:
        return router(sent, {self.name: self.pod}) == self.name if self.frontend else sent.worker == self.name

    def streams(self, traffic: Traffic) -> list[Sent]:
        return [each for each in list(traffic.streams.values()) if self.took(each)]

    def lasting(self, traffic: Traffic) -> list[Sent]:
        """Return those that will for a while."""
        streams = self.streams(traffic)
        return [each for each in streams if each.client >= CLIENTS and time.time() - each.started < LASTS_SECONDS]

    def busy(self, looker: Looker, traffic: Traffic) -> bool:
        """Whether an answer streams from it that will for a while, and others have not begun yet."""
        streams, lasting = self.streams(traffic), self.lasting(traffic)
        rows = [
            row["in_flight"]
            for name in ([self.name] if self.frontend else looker.frontends)
            for row in looker.state(name)["workers"]
            if self.frontend or row["name"] == self.name
        ]
        return bool(lasting and sum(rows) >= len(streams) + 2)

    def lost(self, looker: Looker, sent: Sent) -> bool:
        """Whether a request was there before it was answered elsewhere."""
        return sent.retries > 0 if self.frontend else self.name in looker.lost(sent.request_id)


def kill(
    mortal: Deployed, looker: Looker, record: Record, victim: Victim, url: str, *, forgets: bool = False
) -> list[Sent]:
    """Kill a container under load; return requests that it left for another one to answer, when the index is equal.
    ``url``: what answers 200 when the process is back. ``forgets``: whether the engine's cache goes with it.
    """
    process = process_here(victim.pod, victim.container)
    with ExitStack() as stack:
        traffic = stack.enter_context(load(mortal, max_retries=RETRIES if victim.frontend else 0, **LOAD))
        impatient = Traffic()
        if victim.frontend:
            impatient = stack.enter_context(load(mortal, clients=CLIENTS, pause=0.1, max_retries=DEFAULT_MAX_RETRIES))
        traffic.go_on()
        epochs = epochs_of(looker, victim.name) if forgets else {}
        wait_for(lambda: victim.busy(looker, traffic), BUSY_SECONDS, f"requests are under way at {victim.name}")
        struck = time.time()
        gone = process.kill()
        with watching(looker) as watch:
            back = wait_for(lambda: answers_ok(url, 1) and time.time(), BACK_SECONDS, f"{victim.container} is back")
            waited = watch.again(back, EQUAL_SECONDS, epochs)
            if not victim.frontend:
                served(traffic, watch, victim.name, back, epochs)
        traffic.go_on()
    began = wait_for(lambda: successor(mortal, victim), BACK_SECONDS, "its successor is known").started()
    under_way = [each for each in traffic.sent if each.started < struck < each.ended]
    left = [each for each in under_way if victim.lost(looker, each)]
    interrupted = [each for each in under_way if each in left or victim.took(each)]
    record(
        f"kill -9 of {victim.container}",
        f"{len(traffic.sent)} requests, {len(interrupted)} under way at it, {len(left)} of them answered by another, "
        f"{len(traffic.failed_before_streaming)} failed, "
        f"{len(traffic.failed) - len(traffic.failed_before_streaming)} broke off; process back after "
        f"{began - gone:.2f} s, answers {back - began:.2f} s later, index equal {waited:.2f} s after that, "
        f"{back + waited - began:.2f} s after its start"
        + victim.frontend
        * f"; of {len(impatient.sent)} requests with the default of {DEFAULT_MAX_RETRIES} retries "
        f"{len(impatient.failed_before_streaming)} failed",
    )
    assert interrupted
    assert traffic.failed_before_streaming == [], traffic
    return left


def epochs_of(looker: Looker, worker: str) -> dict[Pair, int]:
    return {pair: looker.view(pair).epoch for pair in looker.pairs if pair.worker == worker}


def served(traffic: Traffic, watch: Watch, worker: str, since: float, epochs: dict[Pair, int]) -> None:
    """Wait until a worker answered requests of ``since`` or later, and every frontend knows what it holds of them."""
    wait_for(lambda: worker in traffic.workers(since), BUSY_SECONDS, f"{worker} answers again", known=traffic.__str__)
    watch.again(time.time(), BACK_SECONDS, epochs, filled=worker)


def successor(mortal: Deployed, victim: Victim) -> Process | None:
    """Return the process of the container that the API server has instead of the former one."""
    now = get(mortal.cluster, "Pod", mortal.namespace, victim.name)
    same = container_id(now, victim.container) == container_id(victim.pod, victim.container)
    return None if same else process(now, victim.container)


def epochs(looker: Looker, pod: dict[str, Any]) -> list[tuple[str, int]]:
    """Return what each frontend says of a worker's life: its id, which is new for each engine, and its epoch."""
    uid = pod["metadata"]["uid"]
    rows = [worker for name in looker.frontends for worker in looker.state(name)["workers"] if worker["uid"] == uid]
    return [(worker["id"], worker["epoch"]) for worker in rows]


def test_every_frontends_index_is_what_the_engines_hold(mortal: Deployed, looker: Looker) -> None:
    with load(mortal, **EVERYWHERE) as traffic, watching(looker) as watch:
        wait_for(lambda: all(len(looker.held(name)["0"]) > 100 for name in looker.workers), 30, "each holds something")
        watch.again(traffic.go_on(), EQUAL_SECONDS)  # while it changes, too
    assert traffic.failed == []
    assert_equal(looker)


def test_a_killed_sidecar_continues_from_its_journal_and_a_replay(
    mortal: Deployed, looker: Looker, record: Record
) -> None:
    pod = workers(mortal)[0]
    process_here(pod, "sidecar")

    def batches() -> float:
        return samples(mortal, pod, METRICS_PORT, "mmrouter_sidecar_batches_total")

    with load(mortal, clients=2 * CLIENTS, pause=0.0, policy="roundRobin"):
        wait_for(lambda: batches() > 1.5 * REPLAY_STEPS, 60, "the engine's history is longer than what it replays")
    before = epochs(looker, pod)
    kill(mortal, looker, record, Victim(pod, "sidecar"), f"http://{address(pod)}:{METRICS_PORT}/readyz")
    assert epochs(looker, pod) == before


def test_a_killed_engine_is_a_new_epoch_and_no_request_fails(mortal: Deployed, looker: Looker, record: Record) -> None:
    pod = workers(mortal)[1]
    before = epochs(looker, pod)
    url = f"http://{address(pod)}:{ENGINE_PORT}/health"
    # Whether a request is sent to another engine depends on the moment; test_forwarder proves that it is.
    kill(mortal, looker, record, Victim(pod, "engine"), url, forgets=True)
    after = epochs(looker, pod)
    assert len(after) == len(looker.frontends)
    assert all(new[0] != old[0] and new[1] > old[1] for old, new in zip(before, after, strict=True))


def test_a_sidecar_that_missed_what_is_not_replayed_begins_an_epoch_that_claims_nothing_of_it(
    mortal: Deployed, looker: Looker
) -> None:
    (pod,) = workers(mortal, FORGETFUL)
    name = pod["metadata"]["name"]
    before = epochs(looker, pod)
    sidecar, engine = process_here(pod, "sidecar"), process_here(pod, "engine")

    def anew() -> bool:
        return all(new > old for (_, old), (_, new) in zip(before, epochs(looker, pod), strict=True))

    with load(mortal, **LOAD) as traffic:
        traffic.go_on()
        # An answer that goes on while no frontend is connected stores more than the one batch that is replayed.
        wait_for(lambda: Victim(pod, "sidecar").lasting(traffic), BUSY_SECONDS, f"a long answer comes from {name}")
        sidecar.kill()
        wait_for(anew, BACK_SECONDS, "every frontend sees another epoch")
        traffic.go_on()
    assert traffic.failed == [], traffic
    assert {seen.pair.worker for seen in looker.differences()} == {name}
    views = [looker.view(pair) for pair in looker.pairs if pair.worker == name]
    assert [view.synced for view in views] == [True for _ in looker.frontends]
    assert [view.held["0"] - looker.held(name)["0"] for view in views] == [set() for _ in looker.frontends]
    known = epochs_of(looker, name)
    gone = engine.kill()  # and what comes after it is known again
    with load(mortal, **EVERYWHERE) as traffic, watching(looker) as watch:
        served(traffic, watch, name, gone, known)


def test_a_killed_frontend_is_exact_again_and_clients_that_retry_lose_nothing(
    mortal: Deployed, looker: Looker, record: Record
) -> None:
    pod = mortal.pods("frontend")[0]
    kill(mortal, looker, record, Victim(pod, "router"), f"http://{address(pod)}:{METRICS_PORT}/readyz")


def own(cluster: Access) -> Node:
    """Return the cluster where it is a node of ours, which may lose what others would miss."""
    if not isinstance(cluster, Node):
        pytest.skip("not run: ends what is not this test's alone")
    return cluster


def test_a_killed_operator_is_not_missed_and_works_on(mortal: Deployed, looker: Looker, record: Record) -> None:
    cluster = own(mortal.cluster)
    leader = get(cluster, "Pod", NAMESPACE, holder(cluster).rpartition("_")[0])
    budget = f"/apis/policy/v1/namespaces/{mortal.namespace}/poddisruptionbudgets/{mortal.name}-frontend"
    before = mortal.containers()
    with load(mortal, pause=0.1) as traffic, watching(looker) as watch:
        traffic.go_on()
        gone = process_here(leader, "operator").kill()
        cluster.request("DELETE", budget).raise_for_status()
        wait_for(lambda: cluster.request("GET", budget).is_success, 60, "what was deleted is made again")
        repaired = time.time() - gone
        waited = watch.again(traffic.go_on(), EQUAL_SECONDS)
    record(
        "kill -9 of the operator",
        f"{len(traffic.sent)} requests, {len(traffic.failed)} failed; a deleted child back after {repaired:.1f} s; "
        f"index equal {waited:.2f} s after that",
    )
    assert traffic.failed == [], traffic
    assert mortal.containers() == before


def test_a_restarted_kubelet_restarts_nothing_else(mortal: Deployed, looker: Looker, record: Record) -> None:
    cluster = own(mortal.cluster)
    before = mortal.containers()
    with load(mortal, pause=0.1) as traffic, watching(looker) as watch:
        traffic.go_on()
        cluster.stop("kubelet")
        traffic.go_on()
        began = time.time()
        cluster.start("kubelet")
        wait_for(lambda: renewed(cluster) > began, BACK_SECONDS, "the kubelet is back")
        back = time.time()
        waited = watch.again(back, EQUAL_SECONDS)
        traffic.go_on(60)
    record(
        "kubelet killed and started",
        f"{len(traffic.sent)} requests, {len(traffic.failed)} failed; kubelet back in {back - began:.1f} s; "
        f"index equal within {waited:.2f} s",
    )
    assert traffic.failed_before_streaming == [], f"{traffic}\n{dump(cluster, mortal.namespace)}"
    assert mortal.containers() == before


def renewed(cluster: Access) -> float:
    renewed_at = get(cluster, "Lease", "kube-node-lease", NAME)["spec"]["renewTime"]
    return datetime.fromisoformat(renewed_at).timestamp()
