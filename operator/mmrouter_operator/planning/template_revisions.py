"""Which pod template a Deployment gets: the one kept from before as long as what it was made from is the same. Pure.

Rendering code changes with the operator's version, and with it the rendered template. That alone must not restart an
engine, so every template is kept in a ControllerRevision with the hash of its *inputs*: what the user said and the
secrets (``render/inputs.py``). While the inputs are equal the kept template is applied, which also repairs drift from
it. The user changes the spec, or sets ``mmrouter.io/adopt``, to get a new one.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from mmrouter_lib import __version__
from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.labels import ADOPT, COMPATIBILITY, INPUTS_HASH, RENDERING_HASH
from mmrouter_operator.model.snapshot import RevisionView, Snapshot
from mmrouter_operator.planning.rollout import pods_of, pool_of, role_of, template_hash
from mmrouter_operator.render import controllerrevision
from mmrouter_operator.render.pod.template_inputs import SET_ROLES

KEPT = 3
"""Revisions that are kept, besides those that a Deployment still runs."""


def adopts(dep: MMRouterDeployment, version: str = __version__) -> bool:
    """Whether the user lets this operator version's rendering replace the kept templates."""
    return dep.metadata.annotations.get(ADOPT) in ("true", version)


def choose_templates(
    desired: Sequence[dict[str, Any]], snapshot: Snapshot, adopt: bool, dep: MMRouterDeployment
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Return the manifests with the pod templates to use, and the ControllerRevision to apply before them, if any.

    Manifests are values: parts of them are shared and none is ever changed. Every template gets the annotation
    ``mmrouter.io/rendering-hash``: the inputs of two templates may be equal while an adoption replaces one by the
    other.
    """
    newest = max(snapshot.revisions, key=lambda revision: revision.number, default=None)
    deployments = [manifest for manifest in desired if manifest["kind"] == "Deployment"]
    rendered = {m["metadata"]["name"]: _signed(m["spec"]["template"]) for m in deployments}
    chosen = dict(rendered)
    if not adopt:
        for manifest in deployments:
            name = manifest["metadata"]["name"]
            chosen[name] = _kept(name, inputs_of(rendered[name]), manifest, snapshot, newest) or rendered[name]
        together = [m["metadata"]["name"] for m in deployments if role_of(m) in SET_ROLES]
        if len({_label(chosen[name], COMPATIBILITY) for name in together}) > 1:
            # One of a set has changed, and the others were kept from a release with another layout: they would never
            # pair. A set is adopted whole.
            chosen |= {name: rendered[name] for name in together}
    entries = {name: {"inputs": inputs_of(rendered[name]), "template": chosen[name]} for name in chosen}
    result = [_with_template(m, chosen[m["metadata"]["name"]]) if m in deployments else m for m in desired]
    if newest is not None and _same(_templates(newest), entries):
        # One that was orphaned is applied once more, which takes it back.
        return result, None if newest.owner else controllerrevision.revision(dep, newest.number, entries)
    return result, controllerrevision.revision(dep, 1 + _highest(dep, snapshot), entries)


def _highest(dep: MMRouterDeployment, snapshot: Snapshot) -> int:
    """Return the highest number that a ControllerRevision has, whoever owns it: its data can never be changed."""
    prefix = f"{dep.metadata.name}-"
    names = [name for kind, name in snapshot.children if kind == "ControllerRevision" and name.startswith(prefix)]
    numbers = [int(name[len(prefix) :]) for name in names if name[len(prefix) :].isdecimal()]
    return max([0, *numbers, *(revision.number for revision in snapshot.revisions)])


def inputs_of(template: Mapping[str, Any]) -> str:
    """Return the hash of what a template was made from: the renderer's annotation ``mmrouter.io/template-hash``."""
    return str((template["metadata"].get("annotations") or {}).get(INPUTS_HASH, ""))


def stored_template(revisions: Sequence[RevisionView], name: str, wanted: str) -> dict[str, Any] | None:
    """Return the kept template of a Deployment by its template hash, ``None`` where no revision has it."""
    for revision in sorted(revisions, key=lambda revision: -revision.number):
        template = (_templates(revision).get(name) or {}).get("template")
        if template is not None and _hash_of(template) == wanted:
            return dict(template)
    return None


def surplus_revisions(snapshot: Snapshot, running: Mapping[str, set[str]]) -> tuple[RevisionView, ...]:
    """Return the revisions to delete: older than the last :data:`KEPT`, and with no template that still runs.

    ``running``: Deployment name as rendered -> template hashes of its live Deployments and pods.
    """
    old = sorted(snapshot.revisions, key=lambda revision: -revision.number)[KEPT:]
    newer = snapshot.revisions
    return tuple(revision for revision in old if not _needed(revision, running, newer))


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


def _signed(template: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a template that carries the hash of its own content."""
    metadata = template["metadata"]
    digest = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
    annotations = {**(metadata.get("annotations") or {}), RENDERING_HASH: digest}
    return {**template, "metadata": {**metadata, "annotations": annotations}}


def _with_template(manifest: dict[str, Any], template: Mapping[str, Any]) -> dict[str, Any]:
    return {**manifest, "spec": {**manifest["spec"], "template": template}}


def _label(template: Mapping[str, Any], name: str) -> str:
    return str((template["metadata"].get("labels") or {}).get(name, ""))


def _kept(
    name: str, made_from: str, manifest: Mapping[str, Any], snapshot: Snapshot, newest: RevisionView | None
) -> dict[str, Any] | None:
    """Return the kept template of equal inputs: of the newest revision, or of an older one whose pods still run.

    The older one is what a user goes back to in the middle of a rollout: its pods must not be replaced by equal ones.
    """
    pool, role = pool_of(manifest), role_of(manifest)
    running = {pod.template_hash for pod in pods_of(snapshot.pods, pool, role)}
    for revision in sorted(snapshot.revisions, key=lambda revision: -revision.number):
        entry = _templates(revision).get(name)
        if entry is None or entry.get("inputs") != made_from:
            continue
        template: dict[str, Any] = entry["template"]
        if revision is newest or _hash_of(template) in running:
            return template
    return None


def _templates(revision: RevisionView) -> dict[str, Any]:
    """Return the entries that can be read; a later release may have written others."""
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
