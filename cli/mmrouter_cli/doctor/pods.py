"""Checks of one deployment's pods: what keeps them from running, and their shared memory. Pure."""

from collections.abc import Iterator

from mmrouter.api import MMRouterDeployment, quantity_bytes
from mmrouter_cli.doctor.advice import REASONS
from mmrouter_cli.doctor.facts import DeploymentFacts
from mmrouter_cli.doctor.finding import Finding, ok, problem, warning
from mmrouter_cli.states import Unread
from mmrouter_operator.observe import PodView, pod_view

TIGHT, FULL = 0.75, 0.9
"""Shares of /dev/shm in use from which it is told of, and from which it is a problem."""

_PULLING = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})


def pod_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Whether pods run: images, configuration, crashes, nodes. One pod speaks for all of its pool."""
    check = "pods"
    if isinstance(facts.pods, Unread):
        yield warning(check, f"its pods cannot be read: {facts.pods.why}", "Ask somebody who may read them.")
        return
    views = sorted((pod_view(pod) for pod in facts.pods), key=lambda view: view.name)
    views = [view for view in views if not view.deleting]
    told = set()
    for view in views:
        if view.waiting is not None:
            container, reason, message = view.waiting
            if (view.pool, container, reason) not in told:
                told.add((view.pool, container, reason))
                others = _others(views, view, reason)
                seen = f"{view.name}{others}: container {container} waits, {reason}: {message or 'no message'}"
                yield problem(check, seen, _do(view, container, reason))
        elif view.unschedulable and (view.pool, "", "Unschedulable") not in told:
            told.add((view.pool, "", "Unschedulable"))
            yield problem(check, f"{view.name} has no node: {view.unschedulable}", "See nodes: which says what lacks.")
    ready = sum(view.ready for view in views)
    if ready == len(views):
        yield ok(check, f"all {ready} pods are Ready" if views else "there are none")
    elif not told:
        waiting = [f"{view.name} ({_state(view)})" for view in views if not view.ready]
        shown = ", ".join(waiting[:4]) + (f" and {len(waiting) - 4} more" if len(waiting) > 4 else "")
        do = "Wait; an engine takes minutes to load its weights. Its log: kubectl logs POD -c engine"
        yield warning(check, f"{ready} of {len(views)} pods are Ready; not: {shown}", do)


def memory_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Whether /dev/shm fits into the memory that its container may use, and how full it is."""
    check = "shared memory"
    for pool in dep.spec.pools:
        size = quantity_bytes(pool.shared_memory.size)
        limit = pool.resources.limits.get("memory")
        who = f"pool {pool.name}"
        if limit is not None and size >= quantity_bytes(limit):
            yield problem(
                check,
                f"{who}: sharedMemory.size is {pool.shared_memory.size} and the memory limit {limit}: what is written "
                "there counts against the limit, so the engine is killed before it is full",
                "Raise resources.limits.memory, or lower sharedMemory.size.",
            )
    if isinstance(facts.shared_memory, Unread):
        yield warning(
            check,
            f"sizes are {_sizes(dep)}; how full they are cannot be read from the nodes: {facts.shared_memory.why}",
            "Look into a pod: kubectl exec POD -c engine -- df -h /dev/shm",
        )
        return
    for pod, (used, size) in sorted(facts.shared_memory.items()):
        share = used / size if size else 0.0
        if share >= TIGHT:
            seen = f"{pod}: {used / 2**20:.0f} of {size / 2**20:.0f} MiB of /dev/shm are in use"
            do = "Raise the pool's sharedMemory.size, and its memory limit with it."
            yield problem(check, seen, do) if share >= FULL else warning(check, seen, do)
    known = facts.shared_memory.values()
    most = max((used / size for used, size in known if size), default=0.0)
    if most < TIGHT:
        use = f"at most {most:.0%} of /dev/shm is in use" if facts.shared_memory else "no engine runs"
        yield ok(check, f"sizes are {_sizes(dep)}; {use}")


def _sizes(dep: MMRouterDeployment) -> str:
    return ", ".join(f"{pool.shared_memory.size} ({pool.name})" for pool in dep.spec.pools)


def _do(view: PodView, container: str, reason: str) -> str:
    if reason in _PULLING:
        return REASONS["ImagePullFailed"]
    if reason == "CrashLoopBackOff":
        return f"Look at its log: kubectl logs -n {view.namespace} {view.name} -c {container} --previous"
    return f"kubectl describe pod -n {view.namespace} {view.name}"


def _others(views: list[PodView], first: PodView, reason: str) -> str:
    same = [v for v in views if v.pool == first.pool and v.waiting is not None and v.waiting[1] == reason]
    return f" and {len(same) - 1} more of its pool" if len(same) > 1 else ""


def _state(view: PodView) -> str:
    if view.containers_ready:
        closed = [gate.rpartition("/")[2] for gate, value in view.gates.items() if not value]
        return f"not yet {' and '.join(closed)}" if closed else "starting"
    return view.phase
