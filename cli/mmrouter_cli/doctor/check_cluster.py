"""Checks of the cluster: the definition, the operator, and served APIs. Pure."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

import mmrouter_lib as mmrouter
from mmrouter_cli.doctor.findings import ClusterFacts, Finding, Object, ok, problem, unread, warning
from mmrouter_cli.status.control_api import Unread
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.api.crd import HASH_ANNOTATION, NAME, definition
from mmrouter_operator.model.kinds import (
    DRA_API,
    GATEWAY_API,
    INFERENCE_POOL_API,
    KEDA_API,
    POD_METRICS_APIS,
    POD_MONITOR_API,
    Capabilities,
)
from mmrouter_operator.model.views import pod_view
from mmrouter_operator.status.conditions_from_gateways import gateway_apis

SLACK_SECONDS = 5.0
"""Tolerance of a Lease's age, for clocks that differ."""

_INSTALL = "mmrouter crd | kubectl apply --server-side -f -"


def definition_check(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that the definition is installed, served, and of this version."""
    crd = facts.crd
    if isinstance(crd, Unread):
        yield unread("the definition", crd, them=False)
        return
    if crd is None:
        yield problem(f"{NAME} is not installed", f"Install it: {_INSTALL}")
        return
    wrong = [
        f"{item['type']} is {item['status']}: {item.get('message', '')}"
        for item in (crd.get("status") or {}).get("conditions") or []
        if item["type"] in ("NamesAccepted", "Established") and item["status"] != "True"
    ]
    if wrong:
        yield problem(f"{NAME} is not served: {'; '.join(wrong)}", f"kubectl describe crd {NAME}")
    ours = definition()["metadata"]["annotations"][HASH_ANNOTATION]
    theirs = (crd["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
    if theirs == ours:
        yield ok(f"{NAME} is the one of version {mmrouter.__version__} (schema {ours})")
    else:
        yield problem(
            f"{NAME} has the schema {theirs or 'of an unknown version'}, version {mmrouter.__version__} has {ours}: "
            "fields that one of them does not know are dropped",
            f"Upgrade whichever is older. The definition: {_INSTALL}",
        )


def operator_check(facts: ClusterFacts) -> Iterator[Finding]:
    """Check that an operator runs and exactly one replica leads."""
    yield from _operator_pods(facts)
    if isinstance(facts.leases, Unread):
        yield warning(f"no Lease can be read: {facts.leases.why}", "Run this with the right to read them.")
        return
    if not facts.leases:
        yield problem(
            "no Lease mmrouter-operator in any namespace: no operator has run on this cluster",
            "Install it: helm install mmrouter charts/mmrouter --namespace mmrouter-system --create-namespace",
        )
        return
    fresh = [lease for lease in facts.leases if _is_fresh(lease, facts.now) and _holder(lease)]
    if len(fresh) > 1:
        where = ", ".join(_where(lease) for lease in fresh)
        yield problem(
            f"{len(fresh)} operators lead, each by a Lease of its own: {where}; they undo each other's changes where "
            "they manage the same namespaces",
            "Uninstall all but one, or give each its own namespaces (--namespace).",
        )
    elif fresh:
        (lease,) = fresh
        age = max(_age(lease, facts.now), 0.0)
        yield ok(f"{_holder(lease)} leads by the Lease {_where(lease)}, renewed {age:.0f} s ago")
    else:
        yield _stale(max(facts.leases, key=lambda lease: -_age(lease, facts.now)), facts)


def _stale(lease: Object, facts: ClusterFacts) -> Finding:
    age = _age(lease, facts.now)
    if facts.renewed:
        return warning(
            f"{_holder(lease)} leads, but by this machine's clock it renewed the Lease {age:.0f} s ago: clocks differ",
            "Synchronize the clocks; the operator does not depend on it.",
        )
    logs = f"kubectl logs -n {lease['metadata']['namespace']} -l app.kubernetes.io/name=mmrouter-operator"
    if not _holder(lease):
        return problem(f"the Lease {_where(lease)} has no holder: the operator was stopped", f"Start it; {logs}")
    return problem(
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
                f"pod {where}: container {container} waits, {reason}: {message}",
                f"kubectl describe pod -n {view.namespace} {view.name}",
            )
        elif view.unschedulable:
            yield problem(f"pod {where} has no node: {view.unschedulable}", "Make room, or add a node.")
        version = (pod["metadata"].get("labels") or {}).get("app.kubernetes.io/version", "")
        if version and version != mmrouter.__version__:
            yield warning(
                f"pod {where} is version {version}, this command is {mmrouter.__version__}",
                "Use the command of the operator's version; the findings below follow the rules of this one.",
            )


def api_check(facts: ClusterFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that the cluster serves the APIs that the spec needs beyond the core."""
    if isinstance(facts.apis, Unread):
        yield unread("the served APIs", facts.apis)
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
    fields = {f"frontend.mode: {dep.spec.frontend.mode}": INFERENCE_POOL_API, "frontend.gateway": GATEWAY_API}
    how = "Install the Gateway API and, for a mode with a picker, its inference extension."
    needed = gateway_apis(dep)
    wanted += [(field, (api,), how) for field, api in fields.items() if api in needed]
    claimed = [pool.name for pool in dep.spec.pools if pool.accelerator.claims]
    if claimed:
        how = "Use Kubernetes 1.34 or later, where it is on by default, or accelerator.count instead of claims."
        wanted.append((f"accelerator.claims of {', '.join(claimed)}", (DRA_API,), how))
    for what, apis, how in wanted:
        available = [api for api in apis if served.serves(api)]
        missing = f"{what} needs {' or '.join(apis)}, which the cluster does not serve"
        yield ok(f"{what}: {available[0]} is served") if available else problem(missing, how)
    if not wanted:
        yield ok("the spec needs none beyond the core")


def looks_stale(leases: Sequence[Object], now: float) -> bool:
    """Whether no Lease is fresh by this clock, so that it is worth observing a renewal."""
    return not any(_is_fresh(lease, now) for lease in leases)


def _holder(lease: Object) -> str:
    return str((lease.get("spec") or {}).get("holderIdentity") or "")


def _is_fresh(lease: Object, now: float) -> bool:
    return _age(lease, now) <= float((lease.get("spec") or {}).get("leaseDurationSeconds") or 15) + SLACK_SECONDS


def _age(lease: Object, now: float) -> float:
    renewed = (lease.get("spec") or {}).get("renewTime")
    return now - datetime.fromisoformat(renewed).astimezone(UTC).timestamp() if renewed else float("inf")


def _where(lease: Object) -> str:
    return f"{lease['metadata']['namespace']}/{lease['metadata']['name']}"
