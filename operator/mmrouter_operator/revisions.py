"""Which pod template a Deployment gets: the one kept from before as long as what it was made from is the same. Pure.

Rendering code changes with the operator's version, and with it the rendered template. That alone must not restart an
engine, so every template is kept with its *inputs* in a ControllerRevision. While the inputs are equal the kept
template is applied, which also repairs drift from it. The user changes the spec, or sets ``mmrouter.io/adopt``, to get
a new one.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter import __version__
from mmrouter.api import MMRouterDeployment, Pool
from mmrouter_operator.observe import RevisionView, Snapshot
from mmrouter_operator.render.common import frontend_name, object_metadata
from mmrouter_operator.render.secret import SecretData, fingerprint
from mmrouter_operator.rollout import pool_of, role_of, template_hash

ADOPT = "mmrouter.io/adopt"
"""Annotation of the resource: ``"true"``, or the operator version whose rendering may replace the kept one."""

KEPT = 3
"""Revisions that are kept, besides those that a Deployment still runs."""

REVISION_COMPONENT = "revision"

_NOT_IN_A_TEMPLATE = ("paused", "networkPolicy")
_NOT_OF_AN_ENGINE = ("frontend", "pools", "routing")
_NOT_OF_A_ROUTER = ("sidecar",)
_SCALING = ("replicas", "autoscaling", "weight")
_PLACING = ("resources", "podTemplate", "nodeSelector", "tolerations", "args", "image", "updates", "sharedMemory")

Inputs = dict[str, Any]


def adopts(dep: MMRouterDeployment, version: str = __version__) -> bool:
    """Whether the user lets this operator version's rendering replace the kept templates."""
    return dep.metadata.annotations.get(ADOPT) in ("true", version)


def inputs(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, Inputs]:
    """Return by Deployment name what its pod template is made from: parts of the spec, and the Secret's fingerprint.

    Defaults are left out, so writing one out changes nothing. Replicas, autoscaling, surge and the sections that no pod
    template shows are not in it. A part too many would only adopt a new rendering earlier than needed; a part too few
    would keep an old template where the user changed something, so what is not known to be harmless is in.
    """
    spec = dep.spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    secret = fingerprint(secrets)
    result = {frontend_name(dep): _frontend_inputs(spec) | {"secret": secret}}
    for pool, said in zip(dep.spec.pools, spec["pools"], strict=True):
        result[f"{dep.metadata.name}-{pool.name}"] = _pool_inputs(dep, pool, spec, said) | {"secret": secret}
    return result


def choose_templates(
    desired: Sequence[dict[str, Any]], snapshot: Snapshot, adopt: bool, dep: MMRouterDeployment
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the manifests with the pod templates to use, and the ControllerRevision to apply before them, if any.

    ``snapshot.secrets`` are those that ``desired`` was rendered with; ``desired`` itself is left as it is.
    """
    assert snapshot.secrets is not None  # nothing is rendered without them
    made_from = inputs(dep, snapshot.secrets)
    newest = max(snapshot.revisions, key=lambda revision: revision.number, default=None)
    chosen: list[dict[str, Any]] = []
    entries: dict[str, Any] = {}
    for manifest in desired:
        if manifest["kind"] != "Deployment":
            chosen.append(manifest)
            continue
        name = manifest["metadata"]["name"]
        template = manifest["spec"]["template"]
        if not adopt:
            template = _kept(name, made_from[name], manifest, snapshot, newest) or template
        entries[name] = {"inputs": made_from[name], "template": template}
        chosen.append({**manifest, "spec": {**manifest["spec"], "template": copy.deepcopy(template)}})
    if newest is not None and _same(_templates(newest), entries):
        return chosen, None
    return chosen, _revision(dep, 1 if newest is None else newest.number + 1, entries)


def stored_template(revisions: Sequence[RevisionView], name: str, wanted: str) -> dict[str, Any] | None:
    """Return the kept template of a Deployment by its template hash, ``None`` where no revision has it."""
    for revision in sorted(revisions, key=lambda revision: -revision.number):
        template = (_templates(revision).get(name) or {}).get("template")
        if template is not None and _hash_of(template) == wanted:
            return dict(copy.deepcopy(template))
    return None


def surplus_revisions(snapshot: Snapshot, running: Mapping[str, set[str]]) -> tuple[RevisionView, ...]:
    """Return the revisions to delete: older than the last :data:`KEPT`, and with no template that still runs.

    ``running``: Deployment name as rendered -> template hashes of its live Deployments and pods.
    """
    old = sorted(snapshot.revisions, key=lambda revision: -revision.number)[KEPT:]
    newer = snapshot.revisions
    return tuple(revision for revision in old if not _needed(revision, running, newer))


def stored_inputs(revision: RevisionView, name: str) -> Inputs | None:
    """Return what a kept template was made from."""
    return (_templates(revision).get(name) or {}).get("inputs")


def difference(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths at which two decoded JSON values differ, in a stable order; lists of named things by name."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        found = []
        for key in sorted({*before, *after}):
            found += difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
        return found
    if isinstance(before, list) and isinstance(after, list) and _named(before) and _named(after):
        old, new = ({item["name"]: item for item in items} for items in (before, after))
        found = [] if list(old) == list(new) or set(old) != set(new) else [f"{path} (order)"]
        for name in dict.fromkeys([*old, *new]):
            found += difference(old.get(name), new.get(name), f"{path}[{name}]")
        return found
    return [path]


def _frontend_inputs(spec: Mapping[str, Any]) -> Inputs:
    frontend = {key: value for key, value in spec.get("frontend", {}).items() if key not in ("replicas", "service")}
    pools = [
        {key: value for key, value in pool.items() if key not in ("replicas", "autoscaling", *_PLACING)}
        for pool in spec["pools"]
    ]
    left_out = (*_NOT_IN_A_TEMPLATE, *_NOT_OF_A_ROUTER, "frontend", "pools")
    return {**_without(spec, left_out), "frontend": frontend, "pools": pools}


def _pool_inputs(dep: MMRouterDeployment, pool: Pool, spec: Mapping[str, Any], said: Mapping[str, Any]) -> Inputs:
    mine = _without(said, _SCALING)
    updates = _without(mine.pop("updates", {}), ("maxSurge", "maxUnavailable"))
    if updates:
        mine["updates"] = updates
    return {
        **_without(spec, (*_NOT_IN_A_TEMPLATE, *_NOT_OF_AN_ENGINE)),
        "transfer": dep.spec.routing.transfer,
        "pool": mine,
        # Flags of an engine may depend on who stands beside it: an encoder's connector, for one.
        "roles": sorted({other.role for other in dep.spec.pools}),
    }


def _without(section: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in section.items() if key not in keys}


def _kept(
    name: str, made_from: Inputs, manifest: Mapping[str, Any], snapshot: Snapshot, newest: RevisionView | None
) -> dict[str, Any] | None:
    """Return the kept template of equal inputs: of the newest revision, or of an older one whose pods still run.

    The older one is what a user goes back to in the middle of a rollout: its pods must not be replaced by equal ones.
    """
    pool, role = pool_of(manifest), role_of(manifest)
    running = {pod.template_hash for pod in snapshot.pods if pod.pool == pool and (pool or pod.role == role)}
    for revision in sorted(snapshot.revisions, key=lambda revision: -revision.number):
        entry = _templates(revision).get(name)
        if entry is None or not _same(entry.get("inputs"), made_from):
            continue
        template: dict[str, Any] = entry["template"]
        if revision is newest or _hash_of(template) in running:
            return copy.deepcopy(template)
    return None


def _templates(revision: RevisionView) -> Mapping[str, Any]:
    return revision.data.get("deployments") or {}


def _hash_of(template: Mapping[str, Any]) -> str:
    return template_hash({"spec": {"template": template}})


def _same(left: Any, right: Any) -> bool:
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)


def _named(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "name" in item for item in items)


def _needed(revision: RevisionView, running: Mapping[str, set[str]], revisions: Sequence[RevisionView]) -> bool:
    for name, entry in _templates(revision).items():
        wanted = _hash_of(entry["template"])
        if wanted not in running.get(name, set()):
            continue
        newer = [other for other in revisions if other.number > revision.number]
        if stored_template(newer, name, wanted) is None:
            return True
    return False


def _revision(dep: MMRouterDeployment, number: int, entries: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "apps/v1",
        "kind": "ControllerRevision",
        "metadata": object_metadata(dep, f"{dep.metadata.name}-{number}", REVISION_COMPONENT),
        "revision": number,
        "data": {"deployments": dict(entries)},
    }
