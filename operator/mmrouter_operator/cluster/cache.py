"""What the watches have shown, by deployment: small views, no bodies. Not a place for decisions.

Two things write here: the watches, and the reconciler with the answers to its own writes, so that it never acts on a
state from before them. Whichever is newer stays.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from mmrouter_operator.model.credentials import SecretError, read_secret
from mmrouter_operator.model.refs import RESOURCE
from mmrouter_operator.model.snapshot import (
    ChildView,
    Key,
    PodView,
    RevisionView,
    child_view,
    deployment_view,
    pod_view,
    revision_view,
)
from mmrouter_operator.render.common import DEPLOYMENT_LABEL
from mmrouter_operator.render.secret import SecretData

_VOLATILE = ("resourceVersion", "generation", "managedFields", "uid", "creationTimestamp", "selfLink")
_CONTROLLERS = "deployment.kubernetes.io/"
"""Annotations in which the Deployment controller counts, a moment after every write of ours."""
_REMEMBERED_GONE = 4096


@dataclass(slots=True)
class _Entry:
    """One object. ``content`` is a digest of everything in it that people and controllers set, status left out."""

    key: Key
    uid: str
    version: str
    content: str = ""
    view: ChildView | PodView | None = None
    body: bytes = b""
    secret: SecretData | str = ""


@dataclass(slots=True)
class _Deployment:
    resource: _Entry | None = None
    children: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    pods: dict[str, _Entry] = field(default_factory=dict)


def content_of(obj: Mapping[str, Any]) -> str:
    """Return a digest of an object without its status and what the server counts in its metadata."""
    metadata = {name: value for name, value in obj.get("metadata", {}).items() if name not in _VOLATILE}
    if "annotations" in metadata:
        kept = {name: value for name, value in metadata["annotations"].items() if not name.startswith(_CONTROLLERS)}
        metadata["annotations"] = kept
        if not kept:
            del metadata["annotations"]
    rest = {name: value for name, value in obj.items() if name not in ("metadata", "status")}
    return blake2b(json.dumps([metadata, rest], sort_keys=True).encode(), digest_size=16).hexdigest()


class Cache:
    """All deployments and what belongs to them."""

    def __init__(self) -> None:
        self._deployments: dict[Key, _Deployment] = {}
        self._by_uid: dict[str, dict[str, _Entry]] = {}
        self._gone: OrderedDict[str, str] = OrderedDict()

    def put(self, kind: str, obj: Mapping[str, Any]) -> tuple[Key, ...]:
        """Take an object in. Returns the deployments that look different now."""
        metadata = obj["metadata"]
        uid, version = metadata["uid"], metadata["resourceVersion"]
        key = _key(kind, obj)
        known = self._by_uid.setdefault(kind, {})
        before = known.get(uid)
        if uid in self._gone and not _older(self._gone[uid], version):
            return ()
        if key is None:
            # Somebody took the label away: it is nobody's until it is put back.
            return self.remove(kind, uid, version) if before is not None else ()
        if before is not None and _older(version, before.version):
            return ()
        entry = _entry(kind, key, obj)
        changed: tuple[Key, ...] = ()
        if before is not None and (before.key != key or _place(before) != _place(entry)):
            self._take_out(kind, before)
            changed = (before.key,)
        known[uid] = entry
        self._put_in(kind, entry, metadata["name"])
        if before is not None and not changed and _same(before, entry):
            return ()
        return (*changed, key)

    def remove(self, kind: str, uid: str, version: str = "") -> tuple[Key, ...]:
        """Drop an object that is gone, or out of our selector, since ``version``. Returns what looks different now."""
        entry = self._by_uid.get(kind, {}).pop(uid, None)
        # The answer to a write may come in after the news of its object's end; only something newer brings it back.
        self._gone[uid] = version or (entry.version if entry else "")
        while len(self._gone) > _REMEMBERED_GONE:
            self._gone.popitem(last=False)
        if entry is None:
            return ()
        self._take_out(kind, entry)
        return (entry.key,)

    def versions(self, kind: str) -> dict[str, str]:
        """Return the known objects of a kind: uid -> resource version."""
        return {uid: entry.version for uid, entry in self._by_uid.get(kind, {}).items()}

    def deployments(self) -> list[Key]:
        """Return all deployments whose resource exists."""
        return [key for key, found in self._deployments.items() if found.resource is not None]

    def resource(self, key: Key) -> dict[str, Any] | None:
        """Return the resource as it was seen last, without managed fields."""
        found = self._deployments.get(key)
        if found is None or found.resource is None:
            return None
        body: dict[str, Any] = json.loads(found.resource.body)
        return body

    def children(self, key: Key) -> dict[tuple[str, str], ChildView]:
        """Return everything with this deployment's label, by kind and name, whoever owns it."""
        found = self._deployments.get(key)
        if found is None:
            return {}
        return {place: entry.view for place, entry in found.children.items() if isinstance(entry.view, ChildView)}

    def content(self, key: Key, kind: str, name: str) -> str:
        """Return the digest of a child, empty where there is none."""
        found = self._deployments.get(key)
        entry = found.children.get((kind, name)) if found else None
        return entry.content if entry else ""

    def pods(self, key: Key) -> tuple[PodView, ...]:
        """Return the deployment's pods, by name."""
        found = self._deployments.get(key)
        pods = [entry.view for entry in found.pods.values() if isinstance(entry.view, PodView)] if found else []
        return tuple(sorted(pods, key=lambda pod: pod.name))

    def revisions(self, key: Key, owner: str) -> tuple[RevisionView, ...]:
        """Return the stored renderings that ``owner`` controls, or nobody, oldest first."""
        found = self._deployments.get(key)
        bodies = [
            entry.body
            for (kind, _), entry in (found.children.items() if found else ())
            if kind == "ControllerRevision" and isinstance(entry.view, ChildView) and entry.view.owner in ("", owner)
        ]
        return tuple(sorted((revision_view(json.loads(body)) for body in bodies), key=lambda view: view.number))

    def secret(self, key: Key, name: str) -> SecretData | str | None:
        """Return the deployment's secrets, a sentence on what is wrong with them, or ``None`` where there are none."""
        found = self._deployments.get(key)
        entry = found.children.get(("Secret", name)) if found else None
        return entry.secret if entry else None

    def _put_in(self, kind: str, entry: _Entry, name: str) -> None:
        found = self._deployments.setdefault(entry.key, _Deployment())
        if kind == RESOURCE:
            found.resource = entry
        elif kind == "Pod":
            found.pods[entry.uid] = entry
        else:
            found.children[kind, name] = entry

    def _take_out(self, kind: str, entry: _Entry) -> None:
        found = self._deployments.get(entry.key)
        if found is None:
            return
        # A successor of the same name may have come in first.
        if kind == RESOURCE:
            if found.resource is entry:
                found.resource = None
        elif kind == "Pod":
            found.pods.pop(entry.uid, None)
        elif isinstance(entry.view, ChildView) and found.children.get((kind, entry.view.name)) is entry:
            del found.children[kind, entry.view.name]
        if found.resource is None and not found.children and not found.pods:
            del self._deployments[entry.key]


def _key(kind: str, obj: Mapping[str, Any]) -> Key | None:
    metadata = obj["metadata"]
    name = metadata["name"] if kind == RESOURCE else (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


def _entry(kind: str, key: Key, obj: Mapping[str, Any]) -> _Entry:
    metadata = obj["metadata"]
    entry = _Entry(key, metadata["uid"], metadata["resourceVersion"])
    raw = {"kind": kind, **obj}
    if kind == RESOURCE:
        slim = {**raw, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}
        entry.body = json.dumps(slim).encode()
        # Its status counts too: somebody else's hand in it is drift.
        entry.content = content_of(obj) + content_of({"data": obj.get("status")})
        return entry
    if kind == "Pod":
        entry.view = pod_view(raw)
        return entry
    entry.view = deployment_view(raw) if kind == "Deployment" else child_view(raw)
    entry.content = content_of(obj)
    if kind == "ControllerRevision":
        entry.body = json.dumps(
            {**raw, "metadata": {k: v for k, v in metadata.items() if k != "managedFields"}}
        ).encode()
    if kind == "Secret":
        try:
            entry.secret = read_secret(obj)
        except SecretError as error:
            entry.secret = str(error)
    return entry


def _place(entry: _Entry) -> tuple[Key, str]:
    return entry.key, entry.view.name if entry.view is not None else ""


def _same(before: _Entry, now: _Entry) -> bool:
    if before.content != now.content:
        return False
    if isinstance(before.view, ChildView) and isinstance(now.view, ChildView):
        return replace(before.view, resource_version="") == replace(now.view, resource_version="")
    return before.view == now.view


def _older(version: str, than: str) -> bool:
    # Numbers in every API server; one that is not is taken as news.
    return version.isdigit() and than.isdigit() and int(version) < int(than)
