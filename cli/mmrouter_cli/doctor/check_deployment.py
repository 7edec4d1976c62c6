"""Checks of a deployment's spec, conditions, references, security, pods and their shared memory. Pure."""

from collections.abc import Iterator, Sequence

from mmrouter_cli.doctor.findings import DeploymentFacts, Finding, Object, ok, problem, reason_advice, unread, warning
from mmrouter_cli.status.control_api import Unread
from mmrouter_cli.status.pod_boot import longest, steps, waits_for
from mmrouter_lib.api import MMRouterDeployment, SpecError, quantity_bytes
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.model.kinds import POOL_LABEL
from mmrouter_operator.model.snapshot import PodView
from mmrouter_operator.model.views import pod_view
from mmrouter_operator.render import render
from mmrouter_operator.render.pod.pod_security_violations import violations
from mmrouter_operator.status import conditions as c

ENFORCE = "pod-security.kubernetes.io/enforce"

_UNDER_WAY = frozenset({"RollingOut", "Verifying", "NoReplicas", "Paused", "SecretRecreated", "ScaledToZero"})
"""Reasons of something in progress or intended."""
_ADVICE_ONLY = frozenset(
    (
        *(c.REVISION_PINNED, c.AUTHENTICATED, c.AUTOSCALING, c.MONITORING, c.RESTRICTED),
        *(c.OVERLAID, c.CHAIN, c.PRESSURE, c.COMPATIBLE, c.GATEWAY),
    )
)
"""Conditions that keep nothing from working."""
_ONLY_RESTRICTED = (
    "allowPrivilegeEscalation is not false",
    "it does not drop all capabilities",
    "runAsNonRoot is not true",
    "it runs as root",
    "its seccomp profile is not set",
)
"""Prefixes of violations that the baseline level allows."""


def spec_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that this version can read and render the spec."""
    dep = facts.dep
    if not isinstance(dep, SpecError):
        try:
            render(dep, secrets=new_secret_data())
        except SpecError as error:
            dep = error
    if isinstance(dep, SpecError):
        for path, sentence in dep.errors:
            # The operator may have a default image configured.
            if "no default engine image" in sentence:
                do = "Name one, or configure it in the operator's engineImages: its SpecValid below decides."
                yield warning(f"{path}: {sentence}", do)
            else:
                yield problem(f"{path}: {sentence}", "Correct the field.")
        return
    yield ok("it can be read and rendered")


def condition_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check the conditions that the operator reports."""
    status = facts.resource.get("status") or {}
    conditions = status.get("conditions") or []
    if not conditions:
        yield problem("no operator has processed it yet", "See that one runs and manages this namespace.")
        return
    generation = facts.resource["metadata"].get("generation", 0)
    if status.get("observedGeneration", 0) < generation:
        yield warning(
            f"the status is of generation {status.get('observedGeneration', 0)}, the spec of {generation}",
            "Wait a moment; where that does not help, see the operator's log.",
        )
    # Ready and Degraded report the same as Progressing, in more detail.
    judged = [item for item in conditions if item["type"] != c.PROGRESSING]
    bad = [item for item in judged if item["status"] != ("False" if item["type"] in c.ABNORMAL else "True")]
    for item in bad:
        reason = item["reason"]
        seen = f"{item['type']} is {item['status']}, {reason}: {item.get('message', '')}"
        do = reason_advice(item["type"], reason)
        mild = item["type"] in _ADVICE_ONLY or reason in _UNDER_WAY or item["status"] == "Unknown"
        yield warning(seen, do) if mild else problem(seen, do)
    if not any(item["type"] not in _ADVICE_ONLY for item in bad):
        yield ok(f"{status.get('phase', 'Unknown')}: all conditions of a working deployment hold")


def reference_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that the objects that the resource names exist."""
    for (ref, path), referred in facts.referred.items():
        what = f"{path}: {ref.kind} {ref.name}"
        if isinstance(referred, Unread):
            yield unread(what, referred, them=False)
        elif referred is None:
            where = f" in namespace {ref.namespace}" if ref.namespace else ""
            yield problem(f"{what} does not exist", f"Create the {ref.kind}{where}.")
        elif ref.kind == "PersistentVolumeClaim" and (referred.get("status") or {}).get("phase") == "Lost":
            yield problem(f"{what} has lost its volume", f"kubectl describe pvc -n {ref.namespace} {ref.name}")
    existing = sum(isinstance(referred, dict) for referred in facts.referred.values())
    if existing == len(facts.referred):
        yield ok(f"all {existing} objects that it names exist" if existing else "it names no other objects")


def security_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that the namespace's Pod Security level admits the pods."""
    if isinstance(facts.namespace, Unread):
        yield unread("the namespace", facts.namespace, them=False)
        return
    level = (facts.namespace["metadata"].get("labels") or {}).get(ENFORCE, "")
    broken = violated(dep, level)
    if not level:
        seen = "the namespace enforces no level of its own"
        if not broken:
            yield ok(f"{seen}, and every pod is within restricted")
            return
        yield warning(
            f"{seen}; if the server's default is stricter than privileged, it rejects pods: {'; '.join(broken)}",
            f"State the level: kubectl label namespace {dep.metadata.namespace} {ENFORCE}=privileged",
        )
    elif not broken:
        yield ok(f"the namespace enforces {level}, which the pods are within")
    else:
        yield problem(
            f"the namespace enforces {level}, and pods are not within it: {'; '.join(broken)}",
            "Use sharedMemory.scope: pod and no podTemplate that needs more, or a namespace with another level.",
        )


def network_check(dep: MMRouterDeployment) -> Iterator[Finding]:
    """Report which network policies protect the pods."""
    if dep.spec.network_policy.enabled:
        yield warning(
            "policies exist; whether the cluster's network plugin enforces them is not visible in its API",
            "Try it: a pod of another kind must not reach an engine's port 8000 (docs/children.md has the table).",
        )
    else:
        yield warning(
            "networkPolicy.enabled is false: every pod of the cluster can reach an engine's or a sidecar's port",
            "Enable it unless your own policies do the same. Keys protect these ports in any case.",
        )


def violated(dep: MMRouterDeployment, level: str) -> list[str]:
    """Return the pods' violations of a Pod Security level; without a level, of restricted."""
    if level == "privileged":
        return []
    try:
        objects = render(dep, secrets=new_secret_data())
    except SpecError:
        return []  # reported by the check of the spec
    result = []
    for obj in objects:
        if obj["kind"] == "Deployment":
            pool = obj["spec"]["selector"]["matchLabels"].get(POOL_LABEL, "")
            who = f"pool {pool}" if pool else "frontend"
            for place, what in violations(obj["spec"]["template"]["spec"]):
                # Of the volumes, baseline forbids those of the node only.
                other_volume = "is not among the volumes" in what and not what.startswith("hostPath ")
                if level != "baseline" or not (other_volume or what.startswith(_ONLY_RESTRICTED)):
                    result.append(f"{who}: {place}: {what}")
    return list(dict.fromkeys(result))


TIGHT, FULL = 0.75, 0.9
"""Shares of used /dev/shm from which there is a warning, and a problem."""

_PULLING = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull"})


def pod_check(facts: DeploymentFacts) -> Iterator[Finding]:
    """Check that pods run: images, configuration, crashes, nodes. One pod per pool and reason is reported."""
    if isinstance(facts.pods, Unread):
        yield unread("its pods", facts.pods)
        return
    views = sorted((pod_view(pod) for pod in facts.pods), key=lambda view: view.name)
    views = [view for view in views if not view.deleting]
    reported = set()
    for view in views:
        if view.waiting is not None:
            container, reason, message = view.waiting
            if (view.pool, container, reason) not in reported:
                reported.add((view.pool, container, reason))
                same = [v for v in views if v.pool == view.pool and v.waiting is not None and v.waiting[1] == reason]
                others = f" and {len(same) - 1} more of its pool" if len(same) > 1 else ""
                seen = f"{view.name}{others}: container {container} waits, {reason}: {message or 'no message'}"
                yield problem(seen, _do(view, container, reason))
        elif view.unschedulable and (view.pool, "", "Unschedulable") not in reported:
            reported.add((view.pool, "", "Unschedulable"))
            yield problem(f"{view.name} has no node: {view.unschedulable}", "See nodes, which says what is missing.")
    ready = sum(view.ready for view in views)
    if ready == len(views):
        yield ok(f"all {ready} pods are Ready{_slowest(facts.pods)}" if views else "there are no pods")
        return
    # Pools with a reported pod are left out; others may wait for something else.
    pools = {pool for pool, _, _ in reported}
    unready = [view for view in views if not view.ready and view.pool not in pools]
    if unready:
        pods = {pod["metadata"]["name"]: pod for pod in facts.pods}
        waiting = [f"{view.name} ({waits_for(pods[view.name])})" for view in unready]
        shown = ", ".join(waiting[:4]) + (f" and {len(waiting) - 4} more" if len(waiting) > 4 else "")
        do = "Wait; an engine takes minutes to load its weights. Its log: kubectl logs POD -c engine"
        yield warning(f"{ready} of {len(views)} pods are Ready; not: {shown}", do)


def memory_check(facts: DeploymentFacts, dep: MMRouterDeployment) -> Iterator[Finding]:
    """Check that /dev/shm fits into the container's memory limit, and how full it is."""
    for pool in dep.spec.pools:
        size = quantity_bytes(pool.shared_memory.size)
        limit = pool.resources.limits.get("memory")
        who = f"pool {pool.name}"
        if limit is not None and size >= quantity_bytes(limit):
            yield problem(
                f"{who}: sharedMemory.size is {pool.shared_memory.size} and the memory limit {limit}: what is written "
                "there counts against the limit, so the engine is killed before it is full",
                "Raise resources.limits.memory, or lower sharedMemory.size.",
            )
    if isinstance(facts.shared_memory, Unread):
        yield warning(
            f"sizes are {_sizes(dep)}; how full they are cannot be read from the nodes: {facts.shared_memory.why}",
            "Look into a pod: kubectl exec POD -c engine -- df -h /dev/shm",
        )
        return
    views = [] if isinstance(facts.pods, Unread) else [pod_view(pod) for pod in facts.pods]
    known = {pool.name for pool in dep.spec.pools}  # a pod may be of a pool that the spec no longer has
    pools = {v.name: v.pool for v in views if v.pool in known and v.phase == "Running" and not v.deleting}
    for pod, (used, size) in sorted(facts.shared_memory.items()):
        asked = dep.pool(pools[pod]).shared_memory.size if pod in pools else "0"
        if size < quantity_bytes(asked):
            seen = f"{pod}: its /dev/shm has {size / 2**20:.0f} MiB, the pool's sharedMemory.size is {asked}"
            yield warning(seen, "A memory limit of the pod or the node's own memory is below it: raise or lower one.")
        share = used / size if size else 0.0
        if share >= TIGHT:
            seen = f"{pod}: {used / 2**20:.0f} of {size / 2**20:.0f} MiB of /dev/shm are in use"
            do = "Raise the pool's sharedMemory.size, and its memory limit with it."
            yield problem(seen, do) if share >= FULL else warning(seen, do)
    volumes = facts.shared_memory.values()
    most = max((used / size for used, size in volumes if size), default=0.0)
    young = sorted(pools.keys() - facts.shared_memory.keys())
    if young:
        seen = f"sizes are {_sizes(dep)}; how full they are is not known yet of {', '.join(young)}"
        yield warning(seen, "Run this again: a kubelet measures the volumes of new pods once a minute.")
    elif most < TIGHT:
        use = f"at most {most:.0%} of /dev/shm is in use" if volumes else "no engine runs"
        yield ok(f"sizes are {_sizes(dep)}; {use}")


def _sizes(dep: MMRouterDeployment) -> str:
    return ", ".join(f"{pool.shared_memory.size} ({pool.name})" for pool in dep.spec.pools)


def _do(view: PodView, container: str, reason: str) -> str:
    if reason in _PULLING:
        return reason_advice(c.DEGRADED, "ImagePullFailed")
    if reason == "CrashLoopBackOff":
        return f"Look at its log: kubectl logs -n {view.namespace} {view.name} -c {container} --previous"
    return f"kubectl describe pod -n {view.namespace} {view.name}"


def _slowest(pods: Sequence[Object]) -> str:
    """Return which pod took longest from its creation to Ready, and why."""
    took = [(done[-1].at, pod["metadata"]["name"], longest(done)) for pod in pods if (done := steps(pod))]
    seconds, name, most = max(took, key=lambda row: row[0], default=(0.0, "", None))
    if most is None:
        return ""
    return f"; the slowest, {name}, took {seconds:.0f} s, {most.took:.0f} of them until {most.until}"
