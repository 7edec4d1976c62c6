"""TLS on the engines' HTTP port: volumes, and the container that copies the certificate for the engine.

An engine notices changes only of files that are rewritten in place (docs/engine-facts/vllm.md#tls), so it does not
mount the Secret: a container of ours copies the pair to a volume in memory. Routers and sidecars get the CA only.
"""

from typing import Any, Final

from mmrouter_lib.pod_paths import CONFIG_DIR, ENGINE_TLS_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render.pod import parts

CONTAINER: Final = "engine-certificate"
SECRET_VOLUME: Final = "engine-certificate"  # noqa: S105 - the name of a volume
VOLUME: Final = "engine-tls"
_SECRET_DIR: Final = f"{CONFIG_DIR}/engine-certificate"
_IS_COPIED: Final = "import os; os.stat(os.environ['MMROUTER_ENGINE_TLS'] + '/tls.key')"


def volumes(secret: str) -> list[dict[str, Any]]:
    """Return the volumes of an engine pod: the Secret's pair, and its copy."""
    items = [{"key": name, "path": name} for name in ("tls.crt", "tls.key")]
    return [
        {"name": SECRET_VOLUME, "secret": {"secretName": secret, "items": items, "defaultMode": 0o440}},
        {"name": VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
    ]


def copier(config: OperatorConfig) -> dict[str, Any]:
    """Return the native sidecar that copies the pair. The engine starts after the first copy."""
    return {
        "name": CONTAINER,
        "image": config.image,
        "restartPolicy": "Always",
        "command": ["mmrouter", "engine-certificate"],
        "env": [
            parts.value_env("MMROUTER_ENGINE_SECRET", _SECRET_DIR),
            parts.value_env("MMROUTER_ENGINE_TLS", ENGINE_TLS_DIR),
        ],
        "startupProbe": {
            "exec": {"command": ["python3", "-c", _IS_COPIED]},
            "periodSeconds": 1,
            "failureThreshold": parts.STARTUP_SECONDS,
            "timeoutSeconds": 5,
        },
        "resources": {"requests": {"cpu": "5m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
        **parts.hardened(),
        "volumeMounts": [parts.mount(SECRET_VOLUME, _SECRET_DIR, read_only=True), parts.mount(VOLUME, ENGINE_TLS_DIR)],
    }
