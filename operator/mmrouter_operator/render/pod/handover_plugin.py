"""How our plugin gets into engine pods whose image stays as it is: an init container puts it on a volume of the pod.

The engine's command is then the plugin's start script with the engine's own command behind it
(:func:`mmrouter_lib.engines.base.launch.plugin_command`).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.api.pod_paths import PLUGIN_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod import parts, shared_memory

NAME: Final = "handover-plugin"
"""Of the init container."""
MOST_BYTES: Final = 1 << 30
"""What a renderer keeps of processed images until engines have taken them: seconds of a busy renderer's work."""
_VOLUME: Final = "plugin"


def volume() -> dict[str, Any]:
    """Return the volume."""
    return {"name": _VOLUME, "emptyDir": {"sizeLimit": "64Mi"}}


def mount() -> dict[str, Any]:
    """Return its mount in the engine's container."""
    return parts.mount(_VOLUME, PLUGIN_DIR, read_only=True)


def env(dep: MMRouterDeployment, pool: Pool) -> list[dict[str, Any]]:
    """Return where Python finds the plugin, and how many bytes of processed images it may keep for others."""
    most = min(MOST_BYTES, shared_memory.limit_bytes(dep)) if shared_memory.is_shared(pool) else MOST_BYTES
    return [
        parts.value_env("PYTHONPATH", PLUGIN_DIR),
        parts.value_env("MMROUTER_HANDOVER_BYTES", str(shared_memory.writable(most, pool.resources))),
    ]


def deliver(config: OperatorConfig) -> dict[str, Any]:
    """Return the init container."""
    return {
        "name": NAME,
        "image": config.image,
        "command": ["mmrouter", "plugin", PLUGIN_DIR],
        "env": [],
        **parts.termination_message(),
        "securityContext": parts.container_security(),
        "volumeMounts": [parts.mount(_VOLUME, PLUGIN_DIR)],
    }
