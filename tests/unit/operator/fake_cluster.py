"""A cluster as a table: objects by address, with the server's rules that matter for writing them."""

import copy
from typing import Any

from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.client import AlreadyExists, ApiError, Object, Objects
from mmrouter_operator.model.kinds import Ref
from mmrouter_operator.model.snapshot import Key

Names = list[str]
KEY: Key = ("n", "d")
OWNER = "r"


def manifest(kind: str, name: str, **more: Any) -> Object:
    api = {"Deployment": "apps/v1", "RoleBinding": "rbac.authorization.k8s.io/v1", "ControllerRevision": "apps/v1"}
    owner = {"uid": OWNER, "controller": True, "kind": "MMRouterDeployment", "name": "d", "apiVersion": "x"}
    labels = {"mmrouter.io/deployment": "d", "app.kubernetes.io/managed-by": "mmrouter-operator"}
    metadata = {"name": name, "namespace": "n", "labels": labels, "ownerReferences": [owner]}
    return {"apiVersion": api.get(kind, "v1"), "kind": kind, "metadata": metadata, **more}


class Table:
    """Objects by address; an apply replaces, bumps the version only when something changed, and is written down."""

    def __init__(self, cache: WatchCache) -> None:
        self.cache = cache
        self.objects: dict[Ref, Object] = {}
        self.calls: list[tuple[str, str, str]] = []
        self.version = 0
        self.fail: dict[str, ApiError] = {}
        self.events: list[tuple[str, str, str]] = []
        self.schema: Object = {}
        """What is published of our kind; empty: nothing."""

    async def get(self, ref: Ref) -> Object | None:
        self.calls.append(("get", ref.kind, ref.name))
        return copy.deepcopy(self.objects.get(ref))

    async def apply(self, obj: Object) -> Object:
        ref = Ref.of(obj)
        self.calls.append(("apply", ref.kind, ref.name))
        if ref.name in self.fail:
            raise self.fail[ref.name]
        return self.store(obj)

    async def merge(self, obj: Object) -> Object:
        self.calls.append(("merge", obj["kind"], obj["metadata"]["name"]))
        self.fail.pop(obj["metadata"]["name"], None)
        return self.store(obj)

    async def create(self, obj: Object) -> Object:
        ref = Ref.of(obj)
        self.calls.append(("create", ref.kind, ref.name))
        if ref in self.objects:
            raise AlreadyExists(ref.name)
        return self.store(obj)

    async def published(self) -> Object:
        self.calls.append(("published", "", ""))
        kind = {"group": "mmrouter.io", "version": "v1alpha1", "kind": "MMRouterDeployment"}
        schema = {**self.schema, "x-kubernetes-group-version-kind": [kind]}
        return {"components": {"schemas": {"io.mmrouter.v1alpha1.MMRouterDeployment": schema, "Other": {}}}}

    async def exists(self, ref: Ref) -> bool:
        return ref in self.objects

    async def apply_status(self, obj: Object) -> Object:
        ref = Ref.of(obj)
        self.calls.append(("status", ref.kind, ref.name))
        if "status" in self.fail:
            raise self.fail["status"]
        return self.store({**self.objects[ref], "status": obj["status"]})

    async def event(self, regarding: Object, type: str, reason: str, action: str, note: str) -> None:
        self.events.append((type, reason, note))

    async def delete(self, ref: Ref, uid: str) -> None:
        self.calls.append(("delete", ref.kind, ref.name))
        found = self.objects.get(ref)
        if found is not None and found["metadata"]["uid"] == uid:
            del self.objects[ref]

    async def list(self, kind: str, namespace: str, selector: str) -> Objects:
        return [copy.deepcopy(obj) for ref, obj in self.objects.items() if ref.kind == kind]

    def store(self, obj: Object) -> Object:
        """Write like another client; the watch sees it at once."""
        ref = Ref.of(obj)
        self.version += 1
        before = self.objects.get(ref)
        uid = before["metadata"]["uid"] if before else f"uid-{self.version}"
        stored = copy.deepcopy(obj)
        stored["metadata"] |= {"uid": uid, "resourceVersion": str(self.version)}
        self.objects[ref] = stored
        return copy.deepcopy(stored)

    def edit(self, obj: Object) -> None:
        """Write like another client, with its watch event."""
        self.cache.put(obj["kind"], self.store(obj))

    def applied(self) -> Names:
        """Names in the order of their applies; forgets them."""
        names = [name for verb, _, name in self.calls if verb == "apply"]
        self.calls.clear()
        return names
