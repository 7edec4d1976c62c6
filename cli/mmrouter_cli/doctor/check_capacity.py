"""Checks that every pool's pods have a node or can get demand. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrouter_cli.doctor import node_fit
from mmrouter_cli.doctor.findings import ClusterFacts, DeploymentFacts, Finding, Object, ok, problem, unread, warning
from mmrouter_cli.doctor.node_fit import Amounts, Node
from mmrouter_cli.status.control_api import Unread
from mmrouter_lib.api import AcceleratorKind, MMRouterDeployment, SpecError
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.kinds import POOL_LABEL, ROLE_LABEL
from mmrouter_operator.render import render

_SHOWN = 4
"""Nodes that are named; of others only the number is shown."""


@dataclass(frozen=True, slots=True)
class PodDemand:
    """The pods of one pool or of the frontend: what they request, and how many of them have a node."""

    who: str
    pool: str
    """Empty for the frontend."""
    spec: Mapping[str, Any]
    replicas: int
    extra: int
    """Additional replicas during a rollout, which need nodes at the same time."""
    placed: tuple[str, ...]
    """Nodes of the scheduled pods."""
    kind: AcceleratorKind | None = None
    """Accelerator; ``None`` for the frontend."""

    @property
    def asks(self) -> Amounts:
        return node_fit.requests(self.spec)


def capacity_check(cluster: ClusterFacts, facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that each pool's pods find nodes: labels, taints, devices, and free resources."""
    if isinstance(cluster.nodes, Unread):
        yield unread("nodes", cluster.nodes)
        return
    used = cluster.pods
    if isinstance(used, Unread):
        why = f"pods of other namespaces cannot be read, so their requests are not counted: {used.why}"
        yield warning(why, "Run this with the right to read them.")
        used = facts.pods if not isinstance(facts.pods, Unread) else ()
    nodes = node_fit.nodes_of(cluster.nodes, used)
    try:
        wanted = pods_wanted(dep, facts)
    except SpecError:
        return  # reported by the check of the spec
    # Missing pods take their nodes before the extra pods of rollouts.
    for demand in wanted:
        missing = demand.replicas - len(demand.placed)
        if missing > 0:
            finding, nodes = _missing(demand, missing, nodes)
            yield finding
    for demand in wanted:
        if len(demand.placed) >= demand.replicas:
            yield _placed(demand, nodes)


def pods_wanted(dep: MMRouterDeployment, facts: DeploymentFacts) -> list[PodDemand]:
    """Return what the deployment's pods request, the frontend's last. Raises ``SpecError``."""
    pods = () if isinstance(facts.pods, Unread) else facts.pods
    # The autoscaler decides how many pods its pool has.
    autoscaled = {pool.name for pool in dep.spec.pools if pool.autoscaling is not None}
    counts = (facts.resource.get("status") or {}).get("pools") or []
    scaled = {each["name"]: each["desired"] for each in counts if each["name"] in autoscaled and "desired" in each}
    demands = []
    for obj in render(dep, secrets=new_secret_data()):
        if obj["kind"] != "Deployment":
            continue
        spec = obj["spec"]
        pool = spec["selector"]["matchLabels"].get(POOL_LABEL, "")
        mine = [pod for pod in pods if _is_of(pod, pool)]
        rolling = spec["strategy"].get("rollingUpdate") or {}
        demands.append(
            PodDemand(
                who=f"pool {pool}" if pool else "frontend",
                pool=pool,
                spec=spec["template"]["spec"],
                replicas=scaled.get(pool, spec.get("replicas", 1)),
                extra=_whole(rolling.get("maxSurge")) if not _whole(rolling.get("maxUnavailable")) else 0,
                placed=tuple(pod["spec"]["nodeName"] for pod in mine if pod["spec"].get("nodeName")),
                kind=dep.pool(pool).accelerator.kind if pool else None,
            )
        )
    return demands


def _is_of(pod: Object, pool: str) -> bool:
    labels = pod["metadata"].get("labels") or {}
    ended = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    mine = labels.get(POOL_LABEL) == pool if pool else labels.get(ROLE_LABEL) == "frontend"
    return mine and not ended and "deletionTimestamp" not in pod["metadata"]


def _whole(number: Any) -> int:
    return number if isinstance(number, int) else 0


def _placed(demand: PodDemand, nodes: Sequence[Node]) -> Finding:
    where = f"on {_names(sorted(set(demand.placed)))}" if demand.placed else "no pod is wanted"
    placed = f"{demand.who}: {len(demand.placed)} of {demand.replicas} pods have a node, {where}"
    if demand.replicas and demand.extra and not node_fit.place(demand.asks, 1, _open(demand, nodes))[0]:
        return warning(
            f"{placed}; no node has room for the extra pod of a rollout, which requests {_amounts(demand.asks)}",
            f"Free some, or set updates: {{maxSurge: 0, maxUnavailable: 1}} for {demand.who}.",
        )
    return ok(placed)


def _missing(demand: PodDemand, missing: int, nodes: Sequence[Node]) -> tuple[Finding, list[Node]]:
    """Return the finding on pods without a node, and the nodes after those that fit are placed."""
    fit, rest = node_fit.place(demand.asks, missing, _open(demand, nodes))
    after = {node.name: node for node in rest}
    left = [after.get(node.name, node) for node in nodes]
    placed = f"{demand.who}: {len(demand.placed)} of {demand.replicas} pods have a node"
    if fit == missing:
        return ok(f"{placed}, there is room for the other {missing}"), left
    seen, do = _why(demand, missing - fit, nodes, left)
    return problem(f"{placed}; {seen}", do), left


def _open(demand: PodDemand, nodes: Sequence[Node]) -> list[Node]:
    usable = (node for node in nodes if node.ready and not node.cordoned)
    return [node for node in usable if node_fit.selects(demand.spec, node) and not node_fit.barring(demand.spec, node)]


def _why(demand: PodDemand, short: int, nodes: Sequence[Node], left: Sequence[Node]) -> tuple[str, str]:
    """Return why ``short`` pods find no node, by the first requirement that no node meets, and advice."""
    # Extended resources, whose names have a domain.
    devices = {name: amount for name, amount in demand.asks.items() if "/" in name and amount > 0}
    if not nodes:
        return "the cluster has no nodes", "Add demand."
    selected = [node for node in nodes if node_fit.selects(demand.spec, node)]
    if not selected:
        labels = " and ".join(node_fit.required_labels(demand.spec))
        having = [node.name for node in nodes if devices and not node_fit.lacking(devices, node.allocatable)]
        if having and demand.kind is not None:
            (key, value), *_ = ACCELERATORS[demand.kind].node_labels
            return (
                f"no node has the labels {labels}, but {_names(having)} offers {', '.join(devices)}",
                f"Install the discovery that sets them, or: kubectl label node {having[0]} {key}={value or 'true'}",
            )
        return (
            f"no node has the labels {labels}",
            f"Add a node of that kind, install its device plugin and node feature discovery, or correct "
            f"nodeSelector and accelerator of {demand.who}."
            if devices
            else f"Label a node, or correct nodeSelector of {demand.who}.",
        )
    usable = [node for node in selected if node.ready and not node.cordoned]
    if not usable:
        cordoned = [node.name for node in selected if node.cordoned]
        if cordoned:
            return f"{_names(cordoned)} is cordoned, and no other node fits", f"kubectl uncordon {cordoned[0]}"
        names = [node.name for node in selected]
        return f"{_names(names)} is not Ready, and no other node fits", f"kubectl describe node {names[0]}"
    welcome = [node for node in usable if not node_fit.barring(demand.spec, node)]
    if not welcome:
        taint = node_fit.barring(demand.spec, usable[0])[0]
        text = f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"
        place = f"pools[{demand.pool}]" if demand.pool else "frontend.podTemplate.spec"
        return (
            f"{_names([node.name for node in usable])} has the taint {text}, which the pods do not tolerate",
            f"Add to spec.{place}.tolerations: {{key: {taint['key']}, operator: Exists, effect: {taint['effect']}}}",
        )
    offering = [node for node in welcome if not node_fit.lacking(devices, node.allocatable)]
    if not offering:
        name = next(iter(devices))
        return (
            f"a pod requests {_amounts(devices)}, which {_names([node.name for node in welcome])} does not offer",
            f"See that the device plugin for {name} runs there: kubectl describe node {welcome[0].name}",
        )
    after = {node.name: node for node in left}
    short_of = sorted({name for node in offering for name in node_fit.lacking(demand.asks, after[node.name].free)})
    free = "; ".join(
        f"{node.name}: {', '.join(f'{_number(after[node.name].free.get(name))} {name}' for name in short_of)}"
        for node in offering[:_SHOWN]
    )
    return (
        f"{short} find none: a pod requests {_amounts({name: demand.asks[name] for name in short_of})}, free is {free}",
        f"Free some, add a node, or lower the replicas of {demand.who}.",
    )


def _names(names: Sequence[str]) -> str:
    if len(names) <= _SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:_SHOWN])} and {len(names) - _SHOWN} more"


def _amounts(amounts: Amounts) -> str:
    named = (f"{_number(amount)} {name}" for name, amount in sorted(amounts.items()) if name != "pods")
    return ", ".join(named) or "1 pod"


def _number(amount: Any) -> str:
    if amount is None:
        return "0"
    for unit, size in (("Gi", 2**30), ("Mi", 2**20)):
        if amount >= size:
            return f"{amount / size:.1f}".removesuffix(".0") + unit
    return f"{amount.normalize():f}"
