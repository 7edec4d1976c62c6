"""The engine container of a pool's pods."""

from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool, SpecError
from mmrouter_lib.api.pod_paths import CONFIG_DIR, HUB_CACHE_DIR
from mmrouter_lib.engines.base.launch import HTTP_PORT, Launch, LaunchError, uses_plugin
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.accelerators import ACCELERATORS
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import ENGINE_KEY
from mmrouter_operator.render.metadata import secret_name
from mmrouter_operator.render.pod import handover_plugin, parts, probes, shared_memory


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
    if uses_plugin(dep):
        mounts.append(handover_plugin.mount())
    ports = {"http": HTTP_PORT} | launch.ports
    return {
        "name": "engine",
        "image": engine_image(dep, pool, path, config),
        "command": launch.command,
        "args": launch.args,
        "env": _env(dep, pool, launch, config),
        "ports": [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()],
        **probes.engine_probes(launch, startup_seconds(pool)),
        "lifecycle": probes.announce_by_sidecar() if followed else probes.announce_by_waiting(),
        "resources": _resources(pool),
        **parts.termination_message(),
        "securityContext": parts.container_security(),
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
        *(handover_plugin.env(dep, pool) if uses_plugin(dep) else []),
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
