"""Disaggregated deployments in real pods: their resources, requests to them, and kills of their engines."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from cluster.access import Access
from cluster.resources import condition
from e2e.deploying import Deployed, deploy, example, make_model, process_here, wait_or_dump
from e2e.endpoints import PodWeb, Reached, at_pod, pod_web, reached
from e2e.load import Traffic, load
from prometheus_client.parser import text_string_to_metric_families
from scenarios import Chat

from mmrouter_handover.shm import Entry, ledger
from mmrouter_handover.shm.files import clock
from mmrouter_lib.pod_paths import SHARED_DIR

PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}
"""Labels of a namespace for pods that share a folder of their node."""
ENGINE_PORT = 8000
METRICS_PORT = 9090
TOLD_SECONDS = 30.0
WHOLE_SECONDS = 60.0


@dataclass(frozen=True)
class Chain:
    """A deployment with pools of several roles, and a web server that it fetches from."""

    deployed: Deployed
    reached: Reached
    web: PodWeb

    @property
    def name(self) -> str:
        return self.deployed.name

    @contextmanager
    def chat(self) -> Iterator[Chat]:
        with self.reached.chat(self.name) as made:
            yield made

    def condition(self, type: str) -> dict[str, Any]:
        return condition(self.deployed.cluster, type, self.deployed.namespace, self.name)

    def conditions(self, *types: str) -> dict[str, tuple[str, str]]:
        found = {type: self.condition(type) for type in types}
        return {type: (each.get("status", ""), each.get("reason", "")) for type, each in found.items()}

    def whole(self) -> bool:
        """Whether everything is Ready and requests go through every stage."""
        return self.conditions("Ready", "ChainComplete") == {
            "Ready": ("True", "Serving"),
            "ChainComplete": ("True", "EveryStage"),
        }

    def wait(self, condition: Any, what: str, seconds: float = WHOLE_SECONDS) -> Any:
        return wait_or_dump(self.deployed.cluster, self.deployed.namespace, condition, seconds, what)

    def warned(self, reason: str) -> int:
        """Return how often the operator has told of a condition that became bad for a reason: what passes is kept."""
        path = f"/apis/events.k8s.io/v1/namespaces/{self.deployed.namespace}/events"
        items = self.deployed.cluster.read(path)["items"]
        return sum(item["type"] == "Warning" and item.get("reason") == reason for item in items)

    def without(self, word: str) -> float:
        """Return how many requests the frontends counted that went without something."""
        pods = self.deployed.pods("frontend")
        return sum(samples(self.deployed, pod, METRICS_PORT, "mmrouter_degraded_total", missing=word) for pod in pods)

    def decisions(self, since: float) -> list[dict[str, Any]]:
        with self.reached.control() as control:
            latest = control.get("/control/decisions?count=1000").raise_for_status().json()
        return [each for each in latest if each["at"] >= since]


class NodeFolder:
    """The folder that a deployment's pods share on their node, as one of their processes has it; for as long as needed.
    ``pod``: one that is there. A test is skipped where its processes are not seen from here.
    """

    def __init__(self, pod: dict[str, Any]) -> None:
        engine = process_here(pod, "engine")
        # An open folder stays accessible after it is unmounted.
        self._number = os.open(f"/proc/{engine.pid}/root{SHARED_DIR}", os.O_RDONLY | os.O_DIRECTORY)
        self.path = f"/proc/self/fd/{self._number}/."

    def close(self) -> None:
        os.close(self._number)

    def entries(self) -> list[Entry]:
        return list(ledger(self.path, clock()).entries)

    def images(self) -> list[Entry]:
        """Return the images in the folder, of any writer, in use or not."""
        return [entry for entry in self.entries() if entry.state not in ("owner", "other")]

    def emptied(self) -> bool:
        return not self.images()


@contextmanager
def chained(cluster: Access, namespace: str, spec: Mapping[str, Any]) -> Iterator[Chain]:
    """Deploy ``examples/kind.yaml`` with other parts of its spec and one frontend, and wait until it is proved.
    ``spec``: what stands in place of the example's parts, one level deep.
    """
    body = example()
    whole = body["spec"]
    make_model(cluster, namespace)
    web = pod_web(cluster, namespace, whole["engine"]["image"])
    whole["frontend"] = {"replicas": 1}
    for name, part in spec.items():
        whole[name] = {**whole.get(name, {}), **part} if isinstance(part, Mapping) else part
    whole["routing"] = {**whole.get("routing", {}), "media": web.media}
    made = deploy(cluster, namespace, body)
    with reached(made) as where:
        yield Chain(made, where, web)


def samples(deployed: Deployed, pod: dict[str, Any], port: int, name: str, **labels: str) -> float:
    with at_pod(deployed, pod, port) as url:
        page = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status().text
    return sum(
        each.value
        for family in text_string_to_metric_families(page)
        for each in family.samples
        if each.name == name and labels.items() <= each.labels.items()
    )


def encoded(deployed: Deployed, role: str) -> dict[str, float]:
    """Return pool -> visual tokens that its engines have encoded since they started."""
    found: dict[str, float] = {}
    for pod in deployed.pods(role):
        pool = pod["metadata"]["labels"]["mmrouter.io/pool"]
        tokens = samples(deployed, pod, ENGINE_PORT, "mmrouter_sim_visual_tokens_total")
        found[pool] = found.get(pool, 0.0) + tokens
    return found


def strike(chain: Chain, role: str, reason: str, *, count: int | None = None) -> tuple[Traffic, float]:
    """Kill engines of a role with -9 under load; return the traffic and the time, once a condition has reported it and
    cleared. ``reason``: what the operator is to warn of. ``count``: how many engines, by default all.
    """
    victims = [process_here(pod, "engine") for pod in chain.deployed.pods(role)[:count]]
    assert victims
    warned = chain.warned(reason)
    with load(chain.deployed, clients=3, pause=0.1) as traffic:
        traffic.go_on()
        since = time.time()
        for victim in victims:
            victim.kill()
        chain.wait(lambda: chain.warned(reason) > warned, f"{reason} is reported", TOLD_SECONDS)
        chain.wait(chain.whole, "it is back")
        traffic.go_on()
    return traffic, since
