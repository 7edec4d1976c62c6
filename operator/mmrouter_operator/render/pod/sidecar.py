"""The sidecar container of an engine pod."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.api.pod_paths import CONFIG_DIR, HUB_CACHE_DIR, STATE_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod import parts, shared_memory
from mmrouter_operator.render.pod.probes import our_probes

FEED_PORT: Final = 7557
FEED_REQUESTS_PORT: Final = 7558


def sidecar(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> dict[str, Any]:
    """Return a native sidecar: it is up, and its sockets are bound, before the engine starts."""
    from_hub = dep.spec.model.volume is None
    return {
        "name": "sidecar",
        "image": config.image,
        "restartPolicy": "Always",
        "command": ["mmrouter", "sidecar"],
        "env": [
            *parts.downward_env(),
            parts.value_env("MMROUTER_POOL", pool.name),
            *parts.config_env(),
            parts.value_env("MMROUTER_STATE_DIR", STATE_DIR),
            *(shared_memory.shared_env(dep) if shared_memory.is_shared(pool) else []),
            *([parts.value_env("HF_HUB_CACHE", HUB_CACHE_DIR)] if from_hub else []),
        ],
        "ports": [
            {"name": "feed", "containerPort": FEED_PORT, "protocol": "TCP"},
            {"name": "feed-requests", "containerPort": FEED_REQUESTS_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": parts.METRICS_PORT, "protocol": "TCP"},
        ],
        **our_probes(readiness_period=5),
        "resources": parts.resources(dep.spec.sidecar.resources),
        **parts.termination_message(),
        "securityContext": parts.container_security(),
        "volumeMounts": [
            parts.mount("config", CONFIG_DIR, read_only=True),
            *(parts.model_mount(dep) or [parts.mount("hub", HUB_CACHE_DIR, read_only=True)]),
            parts.mount("state", STATE_DIR),
            # The engine's, so that what lies there can be looked at; the runtime's own would be another.
            shared_memory.own_mount(),
            *([shared_memory.shared_mount()] if shared_memory.is_shared(pool) else []),
        ],
    }
