"""Checks of a deployment's pods: what keeps them from running, and their shared memory. Pure."""

from collections.abc import Iterator, Sequence

from mmrouter_cli.doctor.advice import REASONS
from mmrouter_cli.doctor.facts import DeploymentFacts, Object
from mmrouter_cli.doctor.findings import Finding, ok, problem, warning
from mmrouter_cli.status.frontend_state import Unread
from mmrouter_cli.status.pod_boot import longest, steps, waits_for
from mmrouter_lib.api import MMRouterDeployment, quantity_bytes
from mmrouter_operator.model.snapshot import PodView
from mmrouter_operator.model.views import pod_view

TIGHT, FULL = 0.75, 0.9
"""Shares of used /dev/shm from which there is a warning, and a problem."""

_PULLING = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})


def pod_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that pods run: images, configuration, crashes, nodes. One pod per pool and reason is reported."""
    check = "pods"
    if isinstance(facts.pods, Unread):
        yield warning(check, f"its pods cannot be read: {facts.pods.why}", "Run this with the right to read them.")
        return
    views = sorted((pod_view(pod) for pod in facts.pods), key=lambda view: view.name)
    views = [view for view in views if not view.deleting]
    reported = set()
    for view in views:
        if view.waiting is not None:
            container, reason, message = view.waiting
            if (view.pool, container, reason) not in reported:
                reported.add((view.pool, container, reason))
                others = _others(views, view, reason)
                seen = f"{view.name}{others}: container {container} waits, {reason}: {message or 'no message'}"
                yield problem(check, seen, _do(view, container, reason))
        elif view.unschedulable and (view.pool, "", "Unschedulable") not in reported:
            reported.add((view.pool, "", "Unschedulable"))
            yield problem(
                check, f"{view.name} has no node: {view.unschedulable}", "See nodes, which says what is missing."
            )
    ready = sum(view.ready for view in views)
    if ready == len(views):
        yield ok(check, f"all {ready} pods are Ready{_slowest(facts.pods)}" if views else "there are no pods")
        return
    # Pools with a reported pod are left out; others may wait for something else.
    pools = {pool for pool, _, _ in reported}
    unready = [view for view in views if not view.ready and view.pool not in pools]
    if unready:
        pods = {pod["metadata"]["name"]: pod for pod in facts.pods}
        waiting = [f"{view.name} ({waits_for(pods[view.name])})" for view in unready]
        shown = ", ".join(waiting[:4]) + (f" and {len(waiting) - 4} more" if len(waiting) > 4 else "")
        do = "Wait; an engine takes minutes to load its weights. Its log: kubectl logs POD -c engine"
        yield warning(check, f"{ready} of {len(views)} pods are Ready; not: {shown}", do)


def memory_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that /dev/shm fits into the container's memory limit, and how full it is."""
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
    pools = _engines(facts, dep)
    for pod, (used, size) in sorted(facts.shared_memory.items()):
        asked = dep.pool(pools[pod]).shared_memory.size if pod in pools else "0"
        if size < quantity_bytes(asked):
            seen = f"{pod}: its /dev/shm has {size / 2**20:.0f} MiB, the pool's sharedMemory.size is {asked}"
            yield warning(
                check, seen, "A memory limit of the pod or the node's own memory is below it: raise or lower one."
            )
        share = used / size if size else 0.0
        if share >= TIGHT:
            seen = f"{pod}: {used / 2**20:.0f} of {size / 2**20:.0f} MiB of /dev/shm are in use"
            do = "Raise the pool's sharedMemory.size, and its memory limit with it."
            yield problem(check, seen, do) if share >= FULL else warning(check, seen, do)
    volumes = facts.shared_memory.values()
    most = max((used / size for used, size in volumes if size), default=0.0)
    young = sorted(pools.keys() - facts.shared_memory.keys())
    if young:
        seen = f"sizes are {_sizes(dep)}; how full they are is not known yet of {', '.join(young)}"
        yield warning(check, seen, "Run this again: a kubelet measures the volumes of new pods once a minute.")
    elif most < TIGHT:
        use = f"at most {most:.0%} of /dev/shm is in use" if volumes else "no engine runs"
        yield ok(check, f"sizes are {_sizes(dep)}; {use}")


def _engines(facts: DeploymentFacts, dep: MMRouterDeployment) -> dict[str, str]:
    """Return the running engine pods and their pools, without pools that the spec no longer has."""
    views = [pod_view(pod) for pod in facts.pods] if not isinstance(facts.pods, Unread) else []
    pools = {pool.name for pool in dep.spec.pools}
    return {
        view.name: view.pool for view in views if view.pool in pools and view.phase == "Running" and not view.deleting
    }


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


def _slowest(pods: Sequence[Object]) -> str:
    """Return which pod took longest from its creation to Ready, and why."""
    took = [(done[-1].at, pod["metadata"]["name"], longest(done)) for pod in pods if (done := steps(pod))]
    seconds, name, most = max(took, key=lambda row: row[0], default=(0.0, "", None))
    if most is None:
        return ""
    return f"; the slowest, {name}, took {seconds:.0f} s, {most.took:.0f} of them until {most.until}"
