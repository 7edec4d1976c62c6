"""A namespace with one deployment, whose reconciler writes to a table of objects."""

from typing import Any

from prometheus_client import generate_latest
from unit.operator.fake_cluster import Table

from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.client import Object
from mmrouter_operator.cluster.frontend_stream_reader import FrontendStreams
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.kinds import REPLACE_KEYS, RESOURCE, Ref
from mmrouter_operator.model.snapshot import Key
from mmrouter_operator.runtime.reconciler import Reconciler

KEY: Key = ("team", "vl")
SPEC: dict[str, Any] = {
    "model": {"id": "Qwen/Qwen2.5-VL-3B-Instruct"},
    "engine": {"type": "vllm"},
    "pools": [{"name": "worker", "role": "worker", "replicas": 2, "accelerator": {"kind": "nvidia"}}],
}
ADDRESS = Ref("mmrouter.io/v1alpha1", RESOURCE, *KEY)


class Team:
    """A namespace with one deployment ``vl``, and a reconciler that sees every write at once."""

    def __init__(self, config: OperatorConfig | None = None) -> None:
        self.cache = WatchCache()
        self.table = Table(self.cache)
        self.streams = FrontendStreams(lambda _: None)
        cluster: Any = self.table
        config = config or OperatorConfig()
        self.metrics = Metrics()
        self.reconciler = Reconciler(cluster, self.cache, self.streams, config=config, metrics=self.metrics)

    def want(self, generation: int = 1, **spec: Any) -> None:
        """Write the resource as its user."""
        known = self.table.objects.get(ADDRESS, {})
        metadata = {"name": KEY[1], "namespace": KEY[0], "generation": generation}
        body = {"apiVersion": ADDRESS.api, "kind": RESOURCE, "metadata": metadata, "spec": {**SPEC, **spec}}
        self.table.edit({**body, "status": known["status"]} if "status" in known else body)

    async def run(self, times: int = 1) -> None:
        for _ in range(times):
            await self.reconciler.reconcile(KEY)

    @property
    def resource(self) -> Object:
        found: Object = self.table.objects[ADDRESS]
        return found

    def condition(self, type_: str) -> Object:
        return next((item for item in self.resource["status"]["conditions"] if item["type"] == type_), {})

    def lose_secret(self, *, replace: bool = False, **edits: Any) -> Object:
        """Edit the Secret, perhaps mark it for replacement, and delete it; returns what it was."""
        [secret] = [ref for ref in self.table.objects if ref.kind == "Secret"]
        found: Object = {**self.table.objects.pop(secret), **edits}
        found["metadata"] = {**found["metadata"], "resourceVersion": "900000"}
        if replace:
            found["metadata"]["annotations"] = {REPLACE_KEYS: "true"}
        self.cache.put("Secret", found)
        self.cache.remove("Secret", found["metadata"]["uid"])
        return found

    def of_kind(self, kind: str) -> list[str]:
        return sorted(ref.name for ref in self.table.objects if ref.kind == kind)

    def shown(self) -> str:
        """The metrics, as they are scraped."""
        return generate_latest(self.metrics.registry).decode()

    def sent(self, verb: str) -> int:
        return sum(1 for call in self.table.calls if call[0] == verb)
