"""Which nodes fit a pod: the scheduler's rules, as far as mmrouter's pods use them. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, Final

from mmrouter_lib.api import quantity_value

Amounts = dict[str, Decimal]
Spec = Mapping[str, Any]

_ENDED: Final = ("Succeeded", "Failed")
_BARRING: Final = ("NoSchedule", "NoExecute")


@dataclass(frozen=True, slots=True)
class Node:
    """A node as the scheduler sees it."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, Any], ...]
    allocatable: Amounts
    free: Amounts
    """Allocatable minus the requests of its pods."""
    ready: bool
    cordoned: bool


def nodes_of(nodes: Iterable[Spec], pods: Iterable[Spec]) -> list[Node]:
    """Return the nodes with their free resources."""
    taken: dict[str, Amounts] = {}
    for pod in pods:
        name = (pod.get("spec") or {}).get("nodeName")
        if name and (pod.get("status") or {}).get("phase") not in _ENDED:
            _add(taken.setdefault(name, {}), requests(pod["spec"]))
    return [_node(node, taken.get(node["metadata"]["name"], {})) for node in nodes]


def _node(node: Spec, taken: Amounts) -> Node:
    spec, status = node.get("spec") or {}, node.get("status") or {}
    allocatable = {name: _value(amount) for name, amount in (status.get("allocatable") or {}).items()}
    conditions = {item["type"]: item["status"] for item in status.get("conditions") or []}
    return Node(
        name=node["metadata"]["name"],
        labels=node["metadata"].get("labels") or {},
        taints=tuple(spec.get("taints") or []),
        allocatable=allocatable,
        free={name: amount - taken.get(name, Decimal(0)) for name, amount in allocatable.items()},
        ready=conditions.get("Ready") == "True",
        cordoned=bool(spec.get("unschedulable")),
    )


def requests(pod: Spec) -> Amounts:
    """Return a pod's requests: containers and sidecars together, or a larger init container."""
    running: Amounts = {"pods": Decimal(1)}
    starting: Amounts = {}
    for container in pod.get("initContainers") or []:
        asked = _asked(container)
        if container.get("restartPolicy") == "Always":
            _add(running, asked)
            asked = {}
        # An init container runs beside the sidecars before it.
        now = dict(running)
        _add(now, asked)
        starting = {name: max(starting.get(name, Decimal(0)), now.get(name, Decimal(0))) for name in {*starting, *now}}
    for container in pod.get("containers") or []:
        _add(running, _asked(container))
    whole = {name: max(running.get(name, Decimal(0)), starting.get(name, Decimal(0))) for name in {*running, *starting}}
    _add(whole, {name: _value(amount) for name, amount in (pod.get("overhead") or {}).items()})
    return whole


def selects(pod: Spec, node: Node) -> bool:
    """Whether the pod's node selector and required affinity match the node."""
    if any(node.labels.get(key) != value for key, value in (pod.get("nodeSelector") or {}).items()):
        return False
    terms = _affinity(pod)
    return terms is None or any(_term(term, node) for term in terms)


def barring(pod: Spec, node: Node) -> list[Mapping[str, Any]]:
    """Return the node's taints that keep the pod away."""
    return [
        taint
        for taint in node.taints
        if taint.get("effect") in _BARRING
        and not any(_tolerates(toleration, taint) for toleration in pod.get("tolerations") or [])
    ]


def lacking(asked: Amounts, amounts: Amounts) -> list[str]:
    """Return the resources that do not suffice."""
    return sorted(name for name, amount in asked.items() if amount > 0 and amounts.get(name, Decimal(0)) < amount)


def place(asked: Amounts, count: int, nodes: Sequence[Node]) -> tuple[int, list[Node]]:
    """Place up to ``count`` pods; return how many fit and the nodes afterwards."""
    left = {node.name: dict(node.free) for node in nodes}
    placed = 0
    for node in nodes:
        while placed < count and not lacking(asked, left[node.name]):
            for name, amount in asked.items():
                left[node.name][name] = left[node.name].get(name, Decimal(0)) - amount
            placed += 1
    return placed, [replace(node, free=left[node.name]) for node in nodes]


def required_labels(pod: Spec) -> Iterator[str]:
    """Yield the labels that a node must have, each alternative as one text."""
    yield from (f"{key}={value}" for key, value in (pod.get("nodeSelector") or {}).items())
    terms = [" and ".join(map(_expression, term.get("matchExpressions") or [])) for term in _affinity(pod) or []]
    if terms:
        yield " or ".join(terms)


def _affinity(pod: Spec) -> list[Spec] | None:
    """Return the terms of which a node must match one, ``None`` without a requirement."""
    affinity = (pod.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    return None if required is None else required.get("nodeSelectorTerms") or []


def _asked(container: Spec) -> Amounts:
    resources = container.get("resources") or {}
    # What has a limit and no request asks for its limit.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: _value(amount) for name, amount in asked.items()}


def _add(amounts: Amounts, more: Mapping[str, Decimal]) -> None:
    for name, amount in more.items():
        amounts[name] = amounts.get(name, Decimal(0)) + amount


def _value(quantity: Any) -> Decimal:
    try:
        return quantity_value(str(quantity))
    except ValueError:
        return Decimal(0)  # in a form of quantity that no pod of the deployment requests


def _term(term: Spec, node: Node) -> bool:
    labels = term.get("matchExpressions") or []
    fields = term.get("matchFields") or []
    # A term that says nothing takes no node.
    return bool(labels or fields) and all(
        _holds(item, values.get(item["key"]))
        for items, values in ((labels, node.labels), (fields, {"metadata.name": node.name}))
        for item in items
    )


def _holds(expression: Spec, value: str | None) -> bool:
    wanted = expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in wanted
        case "NotIn":
            return value not in wanted
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt":
            return value is not None and value.isdigit() and int(value) > int(wanted[0])
        case "Lt":
            return value is not None and value.isdigit() and int(value) < int(wanted[0])
    return False


def _tolerates(toleration: Spec, taint: Spec) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return toleration.get("key") in (None, "", taint["key"])
    return toleration.get("key") == taint["key"] and (toleration.get("value") or "") == (taint.get("value") or "")


def _expression(item: Spec) -> str:
    values = item.get("values") or []
    match item["operator"]:
        case "In" if len(values) == 1:
            return f"{item['key']}={values[0]}"
        case "Exists":
            return str(item["key"])
    return f"{item['key']} {item['operator']} {', '.join(values)}".strip()
