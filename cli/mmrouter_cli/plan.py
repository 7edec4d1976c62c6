"""`mmrouter plan`: the steps that applying a file would take, without writing anything."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_lib.engines.base.launch import HTTP_PORT as ENGINE_PORT
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SecretData, SecretError, new_secret_data, read_secret
from mmrouter_operator.model.kinds import CHILD_SELECTOR, DEPLOYMENT_LABEL, INFERENCE_POOL_API, RESOURCE, Ref
from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.model.views import child_view, pod_view, revision_view
from mmrouter_operator.planning.planner import Blocked, Progress
from mmrouter_operator.planning.rollout_progress import pool_of
from mmrouter_operator.planning.rollout_simulation import Simulation, simulate
from mmrouter_operator.planning.template_choice import adopts, choose_templates, difference
from mmrouter_operator.render import CHILD_KINDS, render
from mmrouter_operator.render.child import secret_name
from mmrouter_operator.render.frontend import PICKER_PORT
from mmrouter_operator.render.httproute import route_apis
from mmrouter_operator.render.pod import shared_memory
from mmrouter_operator.render.pod.kv_compatibility import mismatches

_NO_RESTART = ("replicas", "autoscaling", "weight")
STEP = ("action", "kind", "name", "why")
_NO_FRONTEND_RESTART = (
    *("frontend.replicas", "frontend.service", "frontend.gateway", "observability.podMonitor"),
    *("paused", "networkPolicy", "sidecar"),
)
_OF_A_ROUTER = ("name", "role", "parallelism", "blockSize", "accelerator.kind", "sharedMemory")


class PlanError(Exception):
    """The two sides cannot be compared."""


@dataclass(frozen=True, slots=True)
class ChangeReport:
    """The effect of applying a deployment."""

    name: str
    changes: tuple[str, ...]
    """Fields of the spec that differ, as paths below ``spec``."""
    restarts: dict[str, tuple[str, ...]]
    """Deployment whose pods are replaced -> the fields that cause it."""
    rehearsal: Simulation
    adopting: dict[str, tuple[str, ...]]
    """Deployment -> fields of its pod template that this release renders differently; unchanged until adopted."""
    warnings: tuple[str, ...] = ()
    """Settings that keep the resource's pools from working together."""
    choices: tuple[str, ...] = ()
    """What the operator chose itself, and why."""

    def as_json(self) -> dict[str, Any]:
        outcome = self.rehearsal.outcome
        details = {"reason": outcome.reason} if isinstance(outcome, Blocked) else {}
        if isinstance(outcome, Blocked | Progress):
            details["message"] = outcome.message
        return {
            "name": self.name,
            "changes": list(self.changes),
            "restarts": {name: list(fields) for name, fields in self.restarts.items()},
            "rounds": [
                [{name: getattr(step, name) for name in STEP} for step in steps] for steps in self.rehearsal.rounds
            ],
            "outcome": {"type": type(outcome).__name__, **details},
            "adopting": {name: list(fields) for name, fields in self.adopting.items()},
            "warnings": list(self.warnings),
            "choices": list(self.choices),
        }

    def lines(self) -> list[str]:
        lines = [f"changed in the spec: {', '.join(self.changes)}"] if self.changes else []
        for number, steps in enumerate(self.rehearsal.rounds, 1):
            lines.append(f"step {number}" + ("" if number == 1 else ", once the pods of the step before are ready"))
            for step in steps:
                because = self.restarts.get(step.name, ())
                reason = f", because of {', '.join(because)}" if step.action == "restart" and because else ""
                lines.append(f"  {step.action:8}{step.kind} {step.name}{': ' + step.why if step.why else ''}{reason}")
        lines += self.choices if self.rehearsal.rounds else ["nothing to do"]
        if isinstance(self.rehearsal.outcome, Blocked):
            lines.append(f"blocked: {self.rehearsal.outcome.message} ({self.rehearsal.outcome.reason})")
        lines += [f"warning: {sentence}" for sentence in self.warnings]
        for name, fields in self.adopting.items():
            shown = ", ".join(fields[:5]) + (f" and {len(fields) - 5} more" if len(fields) > 5 else "")
            lines.append(
                f"kept as it is: {name}; with the annotation mmrouter.io/adopt it would restart with new {shown}"
            )
        return lines


def from_nothing(dep: MMRouterDeployment, config: OperatorConfig) -> ChangeReport:
    """Return the effect of creating the deployment. Raises ``SpecError``."""
    return _report(dep, _empty(dep, new_secret_data()), None, config)


def from_file(dep: MMRouterDeployment, old: MMRouterDeployment, config: OperatorConfig) -> ChangeReport:
    """Return the steps from one file to the other. Raises :class:`PlanError` and ``SpecError``."""
    names = [(item.metadata.namespace, item.metadata.name) for item in (old, dep)]
    if names[0] != names[1]:
        raise PlanError(f"{'/'.join(names[0])} and {'/'.join(names[1])} are two deployments; a name cannot be changed")
    secrets = new_secret_data()
    before = _empty(old, secrets)
    desired, revision = choose_templates(render(old, secrets=secrets, config=config), before, False, old)
    stands = simulate(desired, before, revision).final
    return _report(dep, replace(stands, resource=_resource(dep)), old, config)


async def from_cluster(dep: MMRouterDeployment, kubeconfig: Path | None, config: OperatorConfig) -> ChangeReport:
    """Return the steps from what the cluster runs. Raises :class:`PlanError` and ``SpecError``."""
    # The cluster's client takes a second to import, and comparing files does not need it.
    from mmrouter_cli.cluster.reader import ClusterError, reading

    try:
        async with reading(kubeconfig) as cluster:
            snapshot, live = await _observe(cluster, dep)
    except ClusterError as error:
        raise PlanError(str(error)) from error
    known = dep.metadata.model_copy(update={"uid": snapshot.resource["metadata"].get("uid", "")})
    return _report(dep.model_copy(update={"metadata": known}), snapshot, live, config)


async def _observe(cluster: Any, dep: MMRouterDeployment) -> tuple[Snapshot, MMRouterDeployment | None]:
    name, namespace = dep.metadata.name, dep.metadata.namespace
    live = await cluster.get(Ref(dep.api_version, RESOURCE, namespace, name))
    secret = await cluster.get(Ref("v1", "Secret", namespace, secret_name(dep)))
    try:
        secrets = new_secret_data() if secret is None else read_secret(secret)
    except SecretError as error:
        raise PlanError(f"Secret {secret_name(dep)}: {error}") from error
    capabilities = await cluster.capabilities()
    selector = f"{DEPLOYMENT_LABEL}={name}"
    objects: list[dict[str, Any]] = []
    for kind in CHILD_KINDS.values():
        if kind.optional and not capabilities.serves(kind.api):
            continue
        if kind.kind in ("Deployment", "ControllerRevision"):
            listed = await cluster.items(KINDS[kind.kind].path(namespace), labelSelector=f"{selector},{CHILD_SELECTOR}")
        else:  # metadata only
            listed = await cluster.list(kind.kind, namespace, f"{selector},{CHILD_SELECTOR}")
        objects += [{**item, "apiVersion": kind.api, "kind": kind.kind} for item in listed]
    pods = await cluster.items(KINDS["Pod"].path(namespace), labelSelector=selector)
    uid = live["metadata"]["uid"] if live is not None else ""
    revisions = [o for o in objects if o["kind"] == "ControllerRevision" and child_view(o).owner == uid]
    snapshot = replace(
        _empty(dep, secrets),
        resource=_resource(dep, uid),
        children={(obj["kind"], obj["metadata"]["name"]): child_view(obj) for obj in objects},
        pods=tuple(pod_view(pod) for pod in pods),
        revisions=tuple(map(revision_view, revisions)),
        capabilities=capabilities,
    )
    return snapshot, None if live is None else parse_deployment({k: v for k, v in live.items() if k != "status"})


def _report(
    dep: MMRouterDeployment, snapshot: Snapshot, old: MMRouterDeployment | None, config: OperatorConfig
) -> ChangeReport:
    assert snapshot.secrets is not None  # _empty() sets them
    rendered = render(dep, secrets=snapshot.secrets, capabilities=snapshot.capabilities, config=config)
    desired, revision = choose_templates(rendered, snapshot, adopts(dep), dep)
    rehearsal = simulate(desired, snapshot, revision)
    changes = () if old is None else tuple(difference(_explicit_spec(old), _explicit_spec(dep)))
    restarted = {step.name for steps in rehearsal.rounds for step in steps if step.action == "restart"}
    pools = {each["metadata"]["name"]: pool_of(each) for each in desired if each["kind"] == "Deployment"}
    return ChangeReport(
        name=dep.metadata.name,
        changes=changes,
        restarts={name: _reasons(changes, pools.get(name, "")) for name in sorted(restarted)},
        rehearsal=rehearsal,
        adopting=_adopting(rendered, desired, snapshot, dep),
        warnings=tuple(pair.sentence() for pair in mismatches(dep)),
        choices=_choices(dep),
    )


def _choices(dep: MMRouterDeployment) -> tuple[str, ...]:
    embeddings = LAUNCHERS[dep.spec.engine.type].embeddings(dep)
    choices = [shared_memory.transfer_line(dep)]
    if embeddings is not None:
        choices.append(f"embeddings between {', '.join(embeddings.pools)}: {embeddings.connector}, {embeddings.why}")
    return (*choices, *_gateway_lines(dep))


def _gateway_lines(dep: MMRouterDeployment) -> Iterator[str]:
    """Yield the objects for gateways, and what a gateway needs beyond them."""
    name, frontend = dep.metadata.name, dep.spec.frontend
    for kind in (["InferencePool"] if frontend.has_picker else []) + (["HTTPRoute"] if frontend.gateway else []):
        apis = route_apis(dep) if kind == "HTTPRoute" else (INFERENCE_POOL_API,)
        yield f"{kind} {name}: where the cluster serves {' and '.join(apis)}"
    needs = [f"bodies of up to {dep.spec.routing.media.max_request_bytes}"]
    if frontend.has_picker:
        protocol = "plain HTTP/2" if frontend.picker_tls == "none" else "TLS"
        needs.append(f"to reach port {PICKER_PORT} of the frontends by {protocol}")
    if frontend.mode == "endpointPicker":
        needs.append(f"to reach port {ENGINE_PORT} of the workers")
        if dep.spec.network_policy.enabled:
            needs.append("a NetworkPolicy that opens both to its pods (docs/gateway.md)")
    if frontend.has_picker or frontend.gateway is not None:
        yield f"a gateway needs: {', '.join(needs)}"


def _adopting(
    rendered: Sequence[dict[str, Any]], desired: Sequence[dict[str, Any]], snapshot: Snapshot, dep: MMRouterDeployment
) -> dict[str, tuple[str, ...]]:
    adopted, _ = choose_templates(rendered, snapshot, True, dep)
    differ = {
        kept["metadata"]["name"]: difference(kept["spec"]["template"]["spec"], new["spec"]["template"]["spec"])
        for kept, new in zip(desired, adopted, strict=True)
        if kept["kind"] == "Deployment"
    }
    return {name: tuple(fields) for name, fields in differ.items() if fields}


def _reasons(changes: Sequence[str], pool: str) -> tuple[str, ...]:
    """Return the changed fields that restart a pool's pods, or the frontend's where ``pool`` is empty."""
    own = tuple(path for path in changes if _restarts(path, pool))
    # A parser of tool calls in a pool's args concerns frontends too, and an encoder the engines beside it.
    return own or tuple(path for path in changes if path.startswith("pools["))


def _restarts(path: str, pool: str) -> bool:
    """Whether a change of this field can restart a pool's pods, or the frontend's where ``pool`` is empty."""
    field = path.partition("].")[2] if path.startswith("pools[") else ""
    if not pool:
        if path.startswith("pools["):
            return field.startswith(_OF_A_ROUTER) or path.endswith("]")
        return not path.startswith(_NO_FRONTEND_RESTART)
    if path.startswith("pools["):
        return path.startswith(f"pools[{pool}]") and not field.startswith(_NO_RESTART)
    return not path.startswith(("frontend", "paused", "networkPolicy", "observability", "verification"))


def _explicit_spec(dep: MMRouterDeployment) -> dict[str, Any]:
    # Without defaults, which the API server adds to objects.
    spec: dict[str, Any] = dep.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return spec


def _empty(dep: MMRouterDeployment, secrets: SecretData) -> Snapshot:
    return Snapshot(resource=_resource(dep), now=0.0, secrets=secrets)


def _resource(dep: MMRouterDeployment, uid: str = "") -> dict[str, Any]:
    metadata = {"name": dep.metadata.name, "namespace": dep.metadata.namespace, "uid": uid}
    return {"metadata": metadata, "spec": dep.spec.model_dump(mode="json", by_alias=True, exclude_unset=True)}
