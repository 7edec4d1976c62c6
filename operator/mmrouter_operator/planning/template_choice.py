"""Chooses the pod template of every Deployment: the stored one while its inputs are unchanged. Pure.

Rendered templates may change with the operator's version. That alone must not restart an engine, so every template is
stored in a ControllerRevision with the hash of its *inputs*: the spec and the secrets
(:mod:`mmrouter_operator.render.pod.spec_hashes`). While the inputs are equal the stored template is applied, which
also repairs drift. A change of the spec, or the annotation ``mmrouter.io/adopt``, takes a new one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib import __version__
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.kinds import ADOPT, COMPATIBILITY, FORMER_HASH, INPUTS_HASH, RENDERING_HASH
from mmrouter_operator.model.snapshot import RevisionView, Snapshot
from mmrouter_operator.planning.rollout_progress import pods_of, pool_of, role_of, template_hash
from mmrouter_operator.render import controllerrevision
from mmrouter_operator.render.pod.spec_hashes import SET_ROLES

REVISION_LIMIT = 3
"""Revisions that are kept, besides those that a Deployment still runs."""


def adopts(dep: MMRouterDeployment) -> bool:
    """Whether this operator version's rendering may replace the stored templates."""
    return dep.metadata.annotations.get(ADOPT) in ("true", __version__)


def choose_templates(
    desired: Sequence[dict[str, Any]], snapshot: Snapshot, adopt: bool, dep: MMRouterDeployment
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the manifests with the pod templates to use, and the ControllerRevision to apply before them, if any.

    Manifests are not modified: parts of them are shared. Every template gets the annotation
    ``mmrouter.io/rendering-hash``: with equal inputs, an adoption may still replace one template by another.
    """
    newest = max(snapshot.revisions, key=lambda revision: revision.number, default=None)
    deployments = [manifest for manifest in desired if manifest["kind"] == "Deployment"]
    rendered = {m["metadata"]["name"]: _signed(m["spec"]["template"]) for m in deployments}
    chosen = dict(rendered)
    if not adopt:
        for manifest in deployments:
            name = manifest["metadata"]["name"]
            now = inputs_of(rendered[name])
            inputs = (now, (manifest["metadata"].get("annotations") or {}).get(FORMER_HASH, now))
            chosen[name] = _stored(name, inputs, manifest, snapshot, newest) or rendered[name]
        together = [m["metadata"]["name"] for m in deployments if role_of(m) in SET_ROLES]
        if len({(chosen[name]["metadata"].get("labels") or {}).get(COMPATIBILITY) for name in together}) > 1:
            # One pool of a set has changed, and the others' stored templates have another layout, so they would never
            # pair. A set is adopted as a whole.
            chosen |= {name: rendered[name] for name in together}
    entries = {name: {"inputs": inputs_of(rendered[name]), "template": chosen[name]} for name in chosen}
    result = [
        {**m, "spec": {**m["spec"], "template": chosen[m["metadata"]["name"]]}} if m["kind"] == "Deployment" else m
        for m in desired
    ]
    if newest is not None and _templates(newest) == entries:
        # An orphaned revision is applied again to restore its owner.
        return result, None if newest.owner else controllerrevision.revision(dep, newest.number, entries)
    return result, controllerrevision.revision(dep, 1 + _highest(dep, snapshot), entries)


def _highest(dep: MMRouterDeployment, snapshot: Snapshot) -> int:
    """Return the highest number that a ControllerRevision has, whatever its owner: its data is immutable."""
    prefix = f"{dep.metadata.name}-"
    names = [name for kind, name in snapshot.children if kind == "ControllerRevision" and name.startswith(prefix)]
    numbers = [int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdecimal()]
    return max([0, *numbers, *(revision.number for revision in snapshot.revisions)])


def inputs_of(template: Mapping[str, Any]) -> str:
    """Return the hash of a template's inputs: the renderer's annotation ``mmrouter.io/template-hash``."""
    return str((template["metadata"].get("annotations") or {}).get(INPUTS_HASH, ""))


def stored_template(revisions: Sequence[RevisionView], name: str, wanted: str) -> dict[str, Any] | None:
    """Return the stored template of a Deployment by its rendering hash, ``None`` if no revision has it."""
    for revision in sorted(revisions, key=lambda revision: -revision.number):
        template = (_templates(revision).get(name) or {}).get("template")
        if template is not None and _hash_of(template) == wanted:
            return dict(template)
    return None


def surplus_revisions(snapshot: Snapshot, running: Mapping[str, set[str]]) -> tuple[RevisionView, ...]:
    """Return the revisions to delete: older than the last :data:`REVISION_LIMIT`, and with no template that still runs.

    ``running``: Deployment name as rendered -> template hashes of its live Deployments and pods.
    """
    old = sorted(snapshot.revisions, key=lambda revision: -revision.number)[REVISION_LIMIT:]
    return tuple(revision for revision in old if not _needed(revision, running, snapshot.revisions))


def difference(before: Any, after: Any, path: str = "") -> list[str]:
    """Return the paths at which two decoded JSON values differ, in a stable order; lists of named things by name."""
    if before == after:
        return []
    if isinstance(before, dict) and isinstance(after, dict):
        paths = []
        for key in sorted({*before, *after}):
            paths += difference(before.get(key), after.get(key), f"{path}.{key}" if path else key)
        return paths
    if isinstance(before, list) and isinstance(after, list) and _named(before) and _named(after):
        old, new = ({item["name"]: item for item in items} for items in (before, after))
        paths = [] if list(old) == list(new) or set(old) != set(new) else [f"{path} (order)"]
        for name in dict.fromkeys([*old, *new]):
            paths += difference(old.get(name), new.get(name), f"{path}[{name}]")
        return paths
    return [path]


def _signed(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a template with the hash of its own content."""
    metadata = template["metadata"]
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
    annotations = {**(metadata.get("annotations") or {}), RENDERING_HASH: digest}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def _stored(
    name: str, inputs: Sequence[str], manifest: Mapping[str, Any], snapshot: Snapshot, newest: RevisionView | None
) -> dict[str, Any] | None:
    """Return the stored template with one of these inputs: of the newest revision, or of an older one that pods run.

    A user returns to the older one in the middle of a rollout: its pods must not be replaced by equal ones.
    """
    pool, role = pool_of(manifest), role_of(manifest)
    running = {pod.template_hash for pod in pods_of(snapshot.pods, pool, role)}
    for revision in sorted(snapshot.revisions, key=lambda revision: -revision.number):
        entry = _templates(revision).get(name)
        if entry is None or entry.get("inputs") not in inputs:
            continue
        template: dict[str, Any] = entry["template"]
        if revision is newest or _hash_of(template) in running:
            return template
    return None


def _templates(revision: RevisionView) -> dict[str, Any]:
    """Return the readable entries; a later release may have written others."""
    entries = revision.data.get("deployments")
    if not isinstance(entries, dict):
        return {}
    return {
        name: entry
        for name, entry in entries.items()
        if isinstance(entry, dict) and isinstance(entry.get("template"), dict) and "metadata" in entry["template"]
    }


def _hash_of(template: Mapping[str, Any]) -> str:
    return template_hash({"spec": {"template": template}})


def _named(items: Sequence[Any]) -> bool:
    return bool(items) and all(isinstance(item, dict) and "name" in item for item in items)


def _needed(revision: RevisionView, running: Mapping[str, set[str]], revisions: Sequence[RevisionView]) -> bool:
    newer = [other for other in revisions if other.number > revision.number]
    hashes = {name: _hash_of(entry["template"]) for name, entry in _templates(revision).items()}
    needed = [(name, wanted) for name, wanted in hashes.items() if wanted in running.get(name, set())]
    return any(stored_template(newer, name, wanted) is None for name, wanted in needed)
