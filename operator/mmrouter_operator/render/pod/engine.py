"""The containers of a pool's pods: engine, sidecar, and the init container that puts our plugin on a volume of the pod.

The engine's image stays as it is: with the plugin, its command is the plugin's start script with the engine's own
command behind it (:mod:`mmrouter_lib.engines.vllm.launch`).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, SpecError
from mmrouter_lib.engines.base.launch import HTTP_PORT, Launch, LaunchError, uses_plugin
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_lib.pod_paths import CONFIG_DIR, ENGINE_TLS_DIR, HUB_CACHE_DIR, PLUGIN_DIR, STATE_DIR
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import ENGINE_KEY
from mmrouter_operator.render.child import secret_name
from mmrouter_operator.render.pod import embedding_volume, engine_tls, parts, shared_memory
from mmrouter_operator.render.pod.parts import our_probes


def engine(dep: MMRouterDeployment, pool: Pool, path: str, config: OperatorConfig) -> dict[str, Any]:
    """Return the container. ``path`` is the pool's field.

    Raises ``SpecError`` where there is no image, or the engine cannot play this role on this accelerator.
    """
    launch = _launch(dep, pool, path)
    followed = pool.role != "renderer"
    mounts = [*(parts.model_mount(dep) or [parts.mount("hub", HUB_CACHE_DIR)])]
    if dep.spec.engine.chat_template is not None:
        mounts.append(parts.mount("engine-config", CONFIG_DIR, read_only=True))
    mounts += [shared_memory.own_mount(), parts.mount("tmp", "/tmp")]  # noqa: S108 - a path in the pod
    if shared_memory.is_shared(pool):
        mounts.append(shared_memory.shared_mount())
    if embedding_volume.is_used(dep, pool):
        mounts.append(embedding_volume.mount())
    if uses_plugin(dep):
        mounts.append(parts.mount(_PLUGIN_VOLUME, PLUGIN_DIR, read_only=True))
    tls = dep.spec.engine.tls is not None
    if tls:
        mounts.append(parts.mount(engine_tls.VOLUME, ENGINE_TLS_DIR, read_only=True))
    return {
        "name": "engine",
        "image": engine_image(dep, pool, path, config),
        "command": launch.command,
        "args": launch.args,
        "env": _env(dep, pool, launch, config),
        "ports": parts.ports({"http": HTTP_PORT} | launch.ports),
        **parts.engine_probes(launch, startup_seconds(pool), tls=tls),
        "lifecycle": parts.announce_by_sidecar() if followed else parts.announce_by_waiting(),
        "resources": _resources(pool),
        **parts.hardened(),
        "volumeMounts": mounts,
    }


def startup_seconds(pool: Pool) -> int:
    """How long the pool's engines may take until they answer."""
    return ACCELERATORS[pool.accelerator.kind].startup_seconds


def engine_image(dep: MMRouterDeployment, pool: Pool, path: str, config: OperatorConfig) -> str:
    """Return the image: the pool's, the deployment's, the site's, or the built-in table's. Raises ``SpecError``."""
    kind = pool.accelerator.kind
    site = config.engine_images.get(f"{dep.spec.engine.type}/{kind}", "")
    default = ACCELERATORS[kind].images.get(dep.spec.engine.type, "")
    image = pool.image or dep.spec.engine.image or site or default
    if not image:
        raise SpecError(
            [(f"{path}.image", f"there is no default engine image for {kind}: name one here or in engine.image")]
        )
    return image


def _launch(dep: MMRouterDeployment, pool: Pool, path: str) -> Launch:
    try:
        return LAUNCHERS[dep.spec.engine.type].launch(dep, pool)
    except LaunchError as error:
        field = f"spec.{error.path}" if error.path.startswith("engine.") else f"{path}.{error.path}"
        raise SpecError([(field, str(error))]) from error


def _env(dep: MMRouterDeployment, pool: Pool, launch: Launch, config: OperatorConfig) -> list[dict[str, Any]]:
    """Return the engine's environment: the wiring, its key, and writable places for what it caches."""
    key = {"secretKeyRef": {"name": secret_name(dep), "key": ENGINE_KEY}}
    env = [
        *parts.downward_env(),
        parts.value_env("MMROUTER_POOL", pool.name),
        {"name": LAUNCHERS[dep.spec.engine.type].api_key_env, "valueFrom": key},
        *(parts.value_env(name, value) for name, value in launch.env.items()),
        *(parts.value_env(name, value) for name, value in ACCELERATORS[pool.accelerator.kind].env.items()),
        *(plugin_env(dep, pool) if uses_plugin(dep) else []),
        *(shared_memory.shared_env(dep, pool.resources) if shared_memory.is_shared(pool) else []),
        # The root is read-only and the user has no entry in /etc/passwd.
        parts.value_env("HOME", "/tmp"),  # noqa: S108
        parts.value_env("USER", "mmrouter"),
        parts.value_env("XDG_CACHE_HOME", "/tmp/cache"),  # noqa: S108
        parts.value_env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"),  # noqa: S108
        parts.value_env("TRITON_CACHE_DIR", "/tmp/triton"),  # noqa: S108
    ]
    if dep.spec.model.volume is not None:
        env.append(parts.value_env("HF_HUB_OFFLINE", "1"))
    else:
        # The sidecar reads the model's metadata files in the cache; its other contents (modules, locks) stay private.
        env.append(parts.value_env("HF_HUB_CACHE", HUB_CACHE_DIR))
    return [*env, *parts.hub_env(dep, config.hub_endpoint)]


def _resources(pool: Pool) -> dict[str, Any]:
    resources = parts.resources(pool.resources)
    accelerator = pool.accelerator
    if accelerator.claims:
        resources["claims"] = [{"name": claim.name} for claim in accelerator.claims]
    elif accelerator.devices:
        name = accelerator.resource_name or ACCELERATORS[accelerator.kind].resource
        # Extended resources go into limits; requests follow them.
        resources["limits"] = {**resources.get("limits", {}), name: str(accelerator.devices)}
    return resources


FEED_PORT: Final = 7557
FEED_REQUESTS_PORT: Final = 7558


def sidecar(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> dict[str, Any]:
    """Return a native sidecar: it is up, and its sockets are bound, before the engine starts."""
    from_hub = dep.spec.model.volume is None
    cleans = pool.role == "encoder" and embedding_volume.is_used(dep, pool)
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
            *(embedding_volume.cleaner_env(dep) if cleans else []),
            *([parts.value_env("HF_HUB_CACHE", HUB_CACHE_DIR)] if from_hub else []),
        ],
        "ports": parts.ports({"feed": FEED_PORT, "feed-requests": FEED_REQUESTS_PORT, "metrics": parts.METRICS_PORT}),
        **our_probes(readiness_period=5),
        "resources": parts.resources(dep.spec.sidecar.resources),
        **parts.hardened(),
        "volumeMounts": [
            parts.mount("config", CONFIG_DIR, read_only=True),
            *(parts.model_mount(dep) or [parts.mount("hub", HUB_CACHE_DIR, read_only=True)]),
            parts.mount("state", STATE_DIR),
            # The engine's, so that what lies there can be looked at; the runtime's own would be another.
            shared_memory.own_mount(),
            *([shared_memory.shared_mount()] if shared_memory.is_shared(pool) else []),
            *([embedding_volume.mount()] if cleans else []),
        ],
    }


PLUGIN_CONTAINER: Final = "handover-plugin"
"""Name of the init container."""
MOST_BYTES: Final = 1 << 30
"""What a renderer keeps of processed images until engines have taken them: seconds of a busy renderer's work."""
_PLUGIN_VOLUME: Final = "plugin"


def plugin_volume() -> dict[str, Any]:
    return {"name": _PLUGIN_VOLUME, "emptyDir": {"sizeLimit": "64Mi"}}


def plugin_env(dep: MMRouterDeployment, pool: Pool) -> list[dict[str, Any]]:
    """Return where Python finds the plugin, and how many bytes of processed images it may keep for others."""
    most = min(MOST_BYTES, shared_memory.limit_bytes(dep)) if shared_memory.is_shared(pool) else MOST_BYTES
    return [
        parts.value_env("PYTHONPATH", PLUGIN_DIR),
        parts.value_env("MMROUTER_HANDOVER_BYTES", str(shared_memory.writable(most, pool.resources))),
    ]


def deliver_plugin(config: OperatorConfig) -> dict[str, Any]:
    return {
        "name": PLUGIN_CONTAINER,
        "image": config.image,
        "command": ["mmrouter", "plugin", PLUGIN_DIR],
        "env": [],
        **parts.hardened(),
        "volumeMounts": [parts.mount(_PLUGIN_VOLUME, PLUGIN_DIR)],
    }
