"""The router's own objects for benchmarks: a fleet of synced and verified workers, its placer, and feed messages."""

from array import array

from bench.placing.block_workload import BLOCK_SIZE, SEED
from mmrouter_lib import feed
from mmrouter_lib.api import MMRouterDeployment, parse_deployment
from mmrouter_router.fleet.workers import Fleet, Member, Worker
from mmrouter_router.intake import Limits, parse_chat
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics

EPOCH = 1
REQUEST = parse_chat(b'{"model": "bench", "messages": [{"role": "user", "content": "in the ids"}]}', Limits(), "bench")


def deployment(*, replicas: int, policy: str = "kv") -> MMRouterDeployment:
    """Return a resource with one pool of workers."""
    return parse_deployment(resource(replicas=replicas, policy=policy))


def resource(*, replicas: int, policy: str = "kv", otlp: str = "") -> dict[str, object]:
    """Return the resource as JSON values; ``otlp`` is the URL of a collector."""
    return {
        "apiVersion": "mmrouter.io/v1alpha1",
        "kind": "MMRouterDeployment",
        "metadata": {"name": "bench"},
        "spec": {
            "model": {"id": "bench/model"},
            "engine": {"type": "vllm", "blockSize": BLOCK_SIZE},
            "routing": {"policy": policy},
            "observability": {"otlpEndpoint": otlp},
            "pools": [{"name": "worker", "role": "worker", "replicas": replicas, "accelerator": {"kind": "cpu"}}],
        },
    }


def heartbeat(uid: str, seq: int, *, block_size: int = BLOCK_SIZE) -> feed.Heartbeat:
    """Return the heartbeat of a worker whose engine is up and whose canary passed."""
    return feed.Heartbeat(
        worker=f"{uid}/boot",
        epoch=EPOCH,
        seq=seq,
        engine="vllm",
        engine_state="up",
        engine_version="bench",
        block_size=block_size,
        model="bench/model",
        revision="",
        digests={},
        canary=feed.CanaryReport(EPOCH, "True"),
    )


def snapshot(request: int, uid: str, keys: bytes = b"") -> feed.SnapshotPart:
    """Return a sidecar's answer with these packed keys."""
    return feed.SnapshotPart(request, f"{uid}/boot", EPOCH, 0, 0, 0, "GPU", keys, True)


def delta(seq: int, packed: bytes) -> feed.Delta:
    """Return a delta that stores packed keys."""
    return feed.Delta(EPOCH, seq, 0.0, 0, 0, "GPU", packed, b"")


def synced(workers: int, *, block_size: int = BLOCK_SIZE, fleet: Fleet | None = None) -> tuple[Fleet, list[Worker]]:
    """Return a fleet of synced and verified workers that hold nothing. ``fleet``: an existing one to join."""
    fleet = fleet if fleet is not None else Fleet(Metrics())
    members = []
    for number in range(workers):
        uid = f"uid-{number}"
        worker = fleet.join(Member(uid, f"worker-{number}", f"127.77.0.{number}", "worker", "worker"))
        for step in fleet.feed_connected(worker):
            fleet.on_reply(worker, snapshot(getattr(step, "id", 0), uid))
        fleet.on_published(worker, heartbeat(uid, 0, block_size=block_size))
        if not worker.routable or worker.canary != "True":
            raise RuntimeError(f"worker {number} is not routable")
        members.append(worker)
    return fleet, members


def placer(fleet: Fleet, workers: int) -> Placer:
    """Return a placer with policy ``kv``."""
    return Placer(deployment(replicas=workers), fleet)


def prepared(ids: "array[int]") -> Prepared:
    """Return a predicted prompt that is ready to be placed; its keys are not computed yet."""
    return Prepared(
        request=REQUEST,
        salt=None,
        images=(),
        ids=ids,
        spans=(),
        exactness="exact",
        reasons=(),
        seed=SEED,
        fingerprint=77,
    )
