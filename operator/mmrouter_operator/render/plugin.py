"""How our plugin gets into engine pods whose image stays as it is: an init container puts it on a volume of the pod.

The engine's command is then the plugin's start script with the engine's own command behind it
(:func:`mmrouter.engines.launching.plugin_command`).
"""

from typing import Any, Final

from mmrouter.api.paths import PLUGIN_DIR
from mmrouter_operator.config import OperatorConfig
from mmrouter_operator.render import common

NAME: Final = "handover-plugin"
"""Of the init container."""
_VOLUME: Final = "plugin"


def volume() -> dict[str, Any]:
    """Return the volume."""
    return {"name": _VOLUME, "emptyDir": {"sizeLimit": "64Mi"}}


def mount() -> dict[str, Any]:
    """Return its mount in the engine's container."""
    return common.mount(_VOLUME, PLUGIN_DIR, read_only=True)


def deliver(config: OperatorConfig) -> dict[str, Any]:
    """Return the init container."""
    return {
        "name": NAME,
        "image": config.image,
        "command": ["mmrouter", "plugin", PLUGIN_DIR],
        "env": [],
        "securityContext": common.container_security(),
        "volumeMounts": [common.mount(_VOLUME, PLUGIN_DIR)],
    }
