"""Changes of a resource after which its children are known: what an operator is disturbed in, and when it is done."""

from dataclasses import dataclass
from typing import Any

from cluster.controlplane import ControlPlane
from cluster.resources import Object, complete, condition, get, resource

from mmrouter_operator.model.kinds import RESOURCE


def settled(plane: ControlPlane, namespace: str, body: Object) -> bool:
    found = get(plane, RESOURCE, namespace, body["metadata"]["name"])
    seen = condition(plane, "SpecValid", namespace).get("observedGeneration") == found["metadata"]["generation"]
    return seen and complete(plane, body, namespace)


@dataclass(frozen=True)
class Change:
    """What a reconcile is about: from ``before``, nothing where it is empty, to ``after``."""

    before: Object
    after: Object
    changed: frozenset[str]


def unscheduled(*, frontend: bool = True, **spec: Any) -> Object:
    """Return a deployment whose pods find no node: how far its children are depends on the operator alone.
    ``frontend``: those of the frontend, too. Without a frontend, engines do not get a new template.
    """
    made = resource(**spec)
    for part in made["spec"]["pools"] + [made["spec"]["frontend"]] * frontend:
        part["podTemplate"] = {"spec": {"nodeSelector": {"example.com/no-node": "here"}}}
    return made


def updated() -> Object:
    made = unscheduled(frontend=False)
    made["spec"]["engine"] |= {"image": "registry.example/engine:2", "args": ["--max-num-seqs=7"]}
    return made


def larger() -> Object:
    pools = unscheduled(replicas=2)["spec"]["pools"]
    pools += [{**pools[0], "name": "more"}]
    pools[0] = {**pools[0], "autoscaling": {"minReplicas": 1, "maxReplicas": 4}}
    return unscheduled(pools=pools)


CHANGES = {
    "create": Change({}, unscheduled(), frozenset({"Service demo", "Deployment demo-worker"})),
    "update": Change(unscheduled(frontend=False), updated(), frozenset({"Deployment demo-worker"})),
    "prune": Change(
        larger(),
        unscheduled(networkPolicy={"enabled": False}),
        frozenset(
            {
                *("Deployment demo-more", "HorizontalPodAutoscaler demo-worker", "NetworkPolicy demo-frontend"),
                *("PodDisruptionBudget demo-worker", "ConfigMap demo-config"),
            }
        ),
    ),
}


def runs(plane: ControlPlane, namespace: str) -> bool:
    """Whether the frontend is as large as it has to be, and none of its pods is an older one."""
    frontend = get(plane, "Deployment", namespace, "demo-frontend")
    seen, wanted = frontend.get("status") or {}, frontend["spec"]["replicas"]
    is_seen = seen.get("observedGeneration") == frontend["metadata"]["generation"]
    return is_seen and {seen.get(name, 0) for name in ("replicas", "updatedReplicas", "availableReplicas")} == {wanted}
