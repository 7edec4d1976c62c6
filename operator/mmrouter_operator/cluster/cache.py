"""The observed objects by deployment, as small views without bodies.

The watches write here, and so does the reconciler with the responses to its own writes, so that it never acts on a
state from before them. The newer version of an object stays.
"""

import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from mmrouter_operator.model.credentials import SecretData, SecretError, read_secret
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, REPLACE_KEYS, RESOURCE
from mmrouter_operator.model.snapshot import ChildView, Key, PodView, RevisionView
from mmrouter_operator.model.views import child_view, pod_view, revision_view

_VOLATILE = ("resourceVersion", "generation", "managedFields", "uid", "creationTimestamp", "selfLink")
_CONTROLLERS = "deployment.kubernetes.io/"
"""Annotations that the Deployment controller changes after every write of the operator."""
_REMEMBERED_DELETIONS = 4096


@dataclass(slots=True)
class _Entry:
    """One object. ``content`` is a digest of it without status and without fields that the server sets."""

    key: Key
    uid: str
    version: str
    content: str = ""
    view: ChildView | PodView | None = None
    body: bytes = b""
    secret: SecretData | str = ""
    lasts: bool = False  # whether a Secret that is deleted is created again with the same keys


@dataclass(slots=True)
class _Deployment:
    resource: _Entry | None = None
    children: dict[tuple[str, str], _Entry] = field(default_factory=dict)
    pods: dict[str, _Entry] = field(default_factory=dict)
    lost: _Entry | None = None  # the Secret that was deleted last


def content_of(obj: Mapping[str, Any]) -> str:
    """Return a digest of an object without its status and the metadata that the server sets."""
    metadata = {name: value for name, value in obj.get("metadata", {}).items() if name not in _VOLATILE}
    if "annotations" in metadata:
        annotations = {
            name: value for name, value in metadata["annotations"].items() if not name.startswith(_CONTROLLERS)
        }
        metadata["annotations"] = annotations
        if not annotations:
            del metadata["annotations"]
    content = {name: value for name, value in obj.items() if name not in ("metadata", "status")}
    return blake2b(json.dumps([metadata, content], sort_keys=True).encode(), digest_size=16).hexdigest()


class WatchCache:
    """All deployments and their objects."""

    def __init__(self) -> None:
        self._deployments: dict[Key, _Deployment] = {}
        self._by_uid: dict[str, dict[str, _Entry]] = {}
        self._deleted: OrderedDict[str, str] = OrderedDict()

    def put(self, kind: str, obj: Mapping[str, Any]) -> tuple[Key, ...]:
        """Store an object. Returns the deployments that changed by it."""
        metadata = obj["metadata"]
        uid, version = metadata["uid"], metadata["resourceVersion"]
        key = _key(kind, obj)
        entries = self._by_uid.setdefault(kind, {})
        before = entries.get(uid)
        if uid in self._deleted and not _older(self._deleted[uid], version):
            return ()
        if key is None:
            # The label was removed, so the object belongs to no deployment.
            return self.remove(kind, uid, version) if before is not None else ()
        if before is not None and _older(version, before.version):
            return ()
        entry = _entry(kind, key, obj)
        changed: tuple[Key, ...] = (key,)
        if before is not None and before.key != key:
            self._take_out(kind, before)
            changed = (before.key, key)
        elif before is not None and (before.content, before.view) == (entry.content, entry.view):
            changed = ()
        entries[uid] = entry
        self._put_in(kind, entry, metadata["name"])
        return changed

    def remove(self, kind: str, uid: str, version: str = "") -> tuple[Key, ...]:
        """Drop an object that was deleted, or left the selector, at ``version``. Returns the changed deployments."""
        entry = self._by_uid.get(kind, {}).pop(uid, None)
        # The response to a write may arrive after the deletion of its object; only a newer version restores it.
        self._deleted[uid] = version or (entry.version if entry else "")
        while len(self._deleted) > _REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        if entry is None:
            return ()
        self._take_out(kind, entry)
        return (entry.key,)

    def uids(self, kind: str, namespace: str = "") -> list[str]:
        """Return the uids of the cached objects of a kind, of all namespaces if ``namespace`` is empty."""
        entries = self._by_uid.get(kind, {}).items()
        return [uid for uid, entry in entries if not namespace or entry.key[0] == namespace]

    def deployments(self) -> list[Key]:
        return [key for key, objects in self._deployments.items() if objects.resource is not None]

    def resource(self, key: Key) -> dict[str, Any] | None:
        """Return the resource as last observed, without managed fields."""
        entry = self._at(key).resource
        return None if entry is None else json.loads(entry.body)

    def children(self, key: Key) -> dict[tuple[str, str], ChildView]:
        """Return every object with this deployment's label, by kind and name, whatever its owner is."""
        known = self._at(key).children
        return {place: entry.view for place, entry in known.items() if isinstance(entry.view, ChildView)}

    def content(self, key: Key, kind: str, name: str) -> str:
        entry = self._at(key).children.get((kind, name))
        return entry.content if entry else ""

    def pods(self, key: Key) -> tuple[PodView, ...]:
        pods = (entry.view for entry in self._at(key).pods.values() if isinstance(entry.view, PodView))
        return tuple(sorted(pods, key=lambda pod: pod.name))

    def revisions(self, key: Key, owner: str) -> tuple[RevisionView, ...]:
        """Return the ControllerRevisions that ``owner`` controls, or no owner, oldest first."""
        bodies = [
            entry.body
            for (kind, _), entry in self._at(key).children.items()
            if kind == "ControllerRevision" and isinstance(entry.view, ChildView) and entry.view.owner in ("", owner)
        ]
        return tuple(sorted((revision_view(json.loads(body)) for body in bodies), key=lambda view: view.number))

    def secret(self, key: Key, name: str) -> SecretData | str | None:
        """Return the deployment's keys, a sentence about what is wrong with them, or ``None`` if there are none."""
        entry = self._at(key).children.get(("Secret", name))
        return entry.secret if entry else None

    def lost_secret(self, key: Key, owner: str) -> SecretData | None:
        """Return the keys of the Secret that ``owner`` had until its deletion; ``None`` if they are to be replaced."""
        entry = self._at(key).lost
        if entry is None or not entry.lasts or not isinstance(entry.view, ChildView) or entry.view.owner != owner:
            return None
        return entry.secret if isinstance(entry.secret, SecretData) else None

    def _at(self, key: Key) -> _Deployment:
        """Return a deployment's objects, for reading only."""
        return self._deployments.get(key) or _Deployment()

    def _put_in(self, kind: str, entry: _Entry, name: str) -> None:
        objects = self._deployments.setdefault(entry.key, _Deployment())
        if kind == RESOURCE:
            objects.resource = entry
        elif kind == "Pod":
            objects.pods[entry.uid] = entry
        else:
            objects.children[kind, name] = entry

    def _take_out(self, kind: str, entry: _Entry) -> None:
        objects = self._deployments.get(entry.key)
        if objects is None:
            return
        # A successor of the same name may have been stored before.
        if kind == RESOURCE:
            if objects.resource is entry:
                objects.resource = None
        elif kind == "Pod":
            objects.pods.pop(entry.uid, None)
        elif isinstance(entry.view, ChildView) and objects.children.get((kind, entry.view.name)) is entry:
            del objects.children[kind, entry.view.name]
            if kind == "Secret":
                objects.lost = entry
        if objects.resource is None and not objects.children and not objects.pods:
            del self._deployments[entry.key]


def _key(kind: str, obj: Mapping[str, Any]) -> Key | None:
    metadata = obj["metadata"]
    name = metadata["name"] if kind == RESOURCE else (metadata.get("labels") or {}).get(DEPLOYMENT_LABEL)
    return (metadata.get("namespace", ""), name) if name else None


def _entry(kind: str, key: Key, obj: Mapping[str, Any]) -> _Entry:
    metadata = obj["metadata"]
    entry = _Entry(key, metadata["uid"], metadata["resourceVersion"])
    raw = {"kind": kind, **obj}
    if kind in (RESOURCE, "ControllerRevision"):
        slim = {**raw, "metadata": {name: value for name, value in metadata.items() if name != "managedFields"}}
        entry.body = json.dumps(slim).encode()
    if kind == RESOURCE:
        # Status included: a change of it by another manager is drift.
        entry.content = content_of(obj) + content_of({"data": obj.get("status")})
        return entry
    if kind == "Pod":
        entry.view = pod_view(raw)
        return entry
    entry.view = child_view(raw)
    entry.content = content_of(obj)
    if kind == "Secret":
        entry.secret = keys_of(obj)
        entry.lasts = (metadata.get("annotations") or {}).get(REPLACE_KEYS) != "true"
    return entry


def keys_of(secret: Mapping[str, Any]) -> SecretData | str:
    """Return the keys of a raw Secret, or a sentence about what is wrong with them."""
    try:
        return read_secret(secret)
    except SecretError as error:
        return str(error)


def _older(version: str, than: str) -> bool:
    # Versions are numbers in every API server; anything else counts as newer.
    return version.isdigit() and than.isdigit() and int(version) < int(than)
