"""Checks of the cluster: the definition, the operator, and served APIs. Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import mmrouter_lib as mmrouter
from mmrouter_cli.doctor.facts import ClusterFacts, Object
from mmrouter_cli.doctor.findings import Finding, ok, problem, warning
from mmrouter_cli.status.frontend_state import Unread
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.api.crd import HASH_ANNOTATION, NAME, VERSION, definition
from mmrouter_operator.model.kinds import DRA_API, KEDA_API, POD_METRICS_APIS, POD_MONITOR_API, Capabilities
from mmrouter_operator.model.views import pod_view

SLACK_SECONDS = 5.0
"""Tolerance of a Lease's age, for clocks that differ."""

_INSTALL = "mmrouter crd | kubectl apply --server-side -f -"


def definition_check(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the definition is installed, served, and of this version."""
    check, crd = "definition", facts.crd
    if isinstance(crd, Unread):
        yield warning(check, f"the definition cannot be read: {crd.why}", "Run this with the right to read it.")
        return
    if crd is None:
        yield problem(check, f"{NAME} is not installed", f"Install it: {_INSTALL}")
        return
    wrong = [
        f"{item['type']} is {item['status']}: {item.get('message', '')}"
        for item in (crd.get("status") or {}).get("conditions") or []
        if item["type"] in ("NamesAccepted", "Established") and item["status"] != "True"
    ]
    if wrong:
        yield problem(check, f"{NAME} is not served: {'; '.join(wrong)}", f"kubectl describe crd {NAME}")
    ours = definition()["metadata"]["annotations"][HASH_ANNOTATION]
    theirs = (crd["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
    if theirs == ours:
        yield ok(check, f"{NAME} is the one of version {mmrouter.__version__} (schema {ours})")
    else:
        yield problem(
            check,
            f"{NAME} has the schema {theirs or 'of an unknown version'}, version {mmrouter.__version__} has {ours}: "
            "fields that one of them does not know are dropped",
            f"Upgrade whichever is older. The definition: {_INSTALL}",
        )


def operator_check(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that an operator runs and exactly one replica leads."""
    check = "operator"
    yield from _operator_pods(facts)
    if isinstance(facts.leases, Unread):
        yield warning(check, f"no Lease can be read: {facts.leases.why}", "Run this with the right to read them.")
        return
    if not facts.leases:
        yield problem(
            check,
            "no Lease mmrouter-operator in any namespace: no operator has run on this cluster",
            "Install it: helm install mmrouter charts/mmrouter --namespace mmrouter-system --create-namespace",
        )
        return
    fresh = [lease for lease in facts.leases if _age(lease, facts.now) <= _duration(lease) + SLACK_SECONDS]
    fresh = [lease for lease in fresh if _holder(lease)]
    if len(fresh) > 1:
        where = ", ".join(_where(lease) for lease in fresh)
        yield problem(
            check,
            f"{len(fresh)} operators lead, each by a Lease of its own: {where}; they undo each other's changes where "
            "they manage the same namespaces",
            "Uninstall all but one, or give each its own namespaces (--namespace).",
        )
    elif fresh:
        (lease,) = fresh
        age = max(_age(lease, facts.now), 0.0)
        yield ok(check, f"{_holder(lease)} leads by the Lease {_where(lease)}, renewed {age:.0f} s ago")
    else:
        yield _stale(max(facts.leases, key=lambda lease: -_age(lease, facts.now)), facts)


def _stale(lease: Object, facts: ClusterFacts) -> Finding:
    check, age = "operator", _age(lease, facts.now)
    if facts.renewed:
        return warning(
            check,
            f"{_holder(lease)} leads, but by this machine's clock it renewed the Lease {age:.0f} s ago: clocks differ",
            "Synchronize the clocks; the operator does not depend on it.",
        )
    logs = f"kubectl logs -n {lease['metadata']['namespace']} -l app.kubernetes.io/name=mmrouter-operator"
    if not _holder(lease):
        return problem(check, f"the Lease {_where(lease)} has no holder: the operator was stopped", f"Start it; {logs}")
    return problem(
        check,
        f"{_holder(lease)} has not renewed the Lease {_where(lease)} for {age:.0f} s: no operator runs",
        f"Look at its pods: {logs}",
    )


def _operator_pods(facts: ClusterFacts) -> Iterator[Finding]:
    if isinstance(facts.operators, Unread):
        return
    for pod in facts.operators:
        view = pod_view(pod)
        where = f"{view.namespace}/{view.name}"
        if view.waiting is not None:
            container, reason, message = view.waiting
            yield problem(
                "operator",
                f"pod {where}: container {container} waits, {reason}: {message}",
                f"kubectl describe pod -n {view.namespace} {view.name}",
            )
        elif view.unschedulable:
            yield problem("operator", f"pod {where} has no node: {view.unschedulable}", "Make room, or add a node.")
        version = (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "")
        if version and version != mmrouter.__version__:
            yield warning(
                "operator",
                f"pod {where} is version {version}, this command is {mmrouter.__version__}",
                "Use the command of the operator's version; the findings below follow the rules of this one.",
            )


def api_check(facts: ClusterFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that the cluster serves the APIs that the spec needs beyond the core."""
    check = "APIs"
    if isinstance(facts.apis, Unread):
        yield warning(
            check, f"the served APIs cannot be read: {facts.apis.why}", "Run this with the right to read them."
        )
        return
    served = Capabilities(facts.apis)
    wanted: list[tuple[str, tuple[str, ...], str]] = []
    scaled = [pool.name for pool in dep.spec.pools if pool.autoscaling is not None]
    if scaled:
        how = "Install prometheus-adapter (with its rules for pods), or KEDA with the operator's prometheusAddress."
        wanted.append((f"autoscaling of {', '.join(scaled)}", (*POD_METRICS_APIS, KEDA_API), how))
    if dep.spec.observability.pod_monitor == "Enabled":
        how = "Install the Prometheus operator, or set observability.podMonitor to Auto."
        wanted.append(("observability.podMonitor", (POD_MONITOR_API,), how))
    claimed = [pool.name for pool in dep.spec.pools if pool.accelerator.claims]
    if claimed:
        how = "Use Kubernetes 1.34 or later, where it is on by default, or accelerator.count instead of claims."
        wanted.append((f"accelerator.claims of {', '.join(claimed)}", (DRA_API,), how))
    for what, apis, how in wanted:
        available = [api for api in apis if served.serves(api)]
        if available:
            yield ok(check, f"{what}: {available[0]} is served")
        else:
            yield problem(check, f"{what} needs {' or '.join(apis)}, which the cluster does not serve", how)
    if not wanted:
        yield ok(check, "the spec needs none beyond the core")


def served_version(facts: ClusterFacts) -> bool:
    """Whether the resource's API is served."""
    return isinstance(facts.apis, Unread) or f"{NAME.partition('.')[2]}/{VERSION}" in facts.apis


def looks_stale(leases: Sequence[Object], now: float) -> bool:
    """Whether no Lease is fresh by this clock, so that it is worth observing a renewal."""
    return all(_age(lease, now) > _duration(lease) + SLACK_SECONDS for lease in leases)


def _spec(lease: Object) -> dict[str, Any]:
    return lease.get("spec") or {}


def _holder(lease: Object) -> str:
    return str(_spec(lease).get("holderIdentity") or "")


def _duration(lease: Object) -> float:
    return float(_spec(lease).get("leaseDurationSeconds") or 15)


def _age(lease: Object, now: float) -> float:
    renewed = _spec(lease).get("renewTime")
    return now - datetime.fromisoformat(renewed).astimezone(UTC).timestamp() if renewed else float("inf")


def _where(lease: Object) -> str:
    return f"{lease['metadata']['namespace']}/{lease['metadata']['name']}"
