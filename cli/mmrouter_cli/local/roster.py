"""Who is there, for frontends without a cluster to ask: the file ``workers.json`` (docs/architecture.md)."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from mmrouter_cli.local.pod import LocalPod

POOL_LABEL = "mmrouter.io/pool"
ROLE_LABEL = "mmrouter.io/role"
COMPATIBILITY_LABEL = "mmrouter.io/compatibility"
LAYOUT_LABEL = "mmrouter.io/kv-layout"
FRONTEND_ROLE = "frontend"


def is_frontend(pod: LocalPod) -> bool:
    """Whether a pod runs the router."""
    return pod.labels.get(ROLE_LABEL) == FRONTEND_ROLE


def roster(pods: Iterable[LocalPod]) -> str:
    """Return the text of ``workers.json``: every engine pod from its first moment, and the frontends."""
    workers, frontends = [], []
    for pod in pods:
        who = {"uid": pod.uid, "name": pod.name, "ip": pod.ip}
        if is_frontend(pod):
            frontends.append(who)
        elif POOL_LABEL in pod.labels:
            role = pod.labels.get(ROLE_LABEL, "worker")
            place = {"node": pod.facts.node, "pool": pod.labels[POOL_LABEL], "role": role}
            layout = (pod.labels.get(name) for name in (COMPATIBILITY_LABEL, LAYOUT_LABEL))
            pairs = {"compatibility": "-".join(filter(None, layout))}
            workers.append({**who, **place, **pairs, "ready": pod.ready, "draining": False})
    return json.dumps({"workers": workers, "frontends": frontends}, indent=1)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file, so that a reader sees the old text or the new one."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.touch(mode=0o600)
    fresh.write_text(text)
    os.replace(fresh, path)
