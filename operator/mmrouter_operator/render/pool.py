"""A pool's Deployment: engine pods, each with the sidecar that reads its events.

Renderers have no cache, so they have no sidecar: the frontends ask them and see for themselves (DESIGN.md 5.3).
"""

from typing import Any

from mmrouter.api import MMRouterDeployment, Pool, SpecError
from mmrouter.api.paths import CONFIG_DIR, HUB_CACHE_DIR, STATE_DIR
from mmrouter.engines import adapter
from mmrouter.engines.launching import HTTP_PORT
from mmrouter_operator.render import common
from mmrouter_operator.render.accelerators import ACCELERATORS
from mmrouter_operator.render.configmap import pool_hash
from mmrouter_operator.render.secret import ENGINE_KEY, SIDECAR_ITEMS, SecretData, fingerprint

FEED_PORT = 7557
FEED_REQUESTS_PORT = 7558

STARTUP_SECONDS = 3600
"""How long an engine may take until it answers: weights come from a network."""

STOP_SECONDS = 30
"""Time to stop once the requests are done."""


def render_pool(dep: MMRouterDeployment, secrets: SecretData, number: int) -> dict[str, Any]:
    """Return the Deployment of ``dep.spec.pools[number]``, role worker or renderer.

    Raises ``SpecError`` for what cannot be rendered: another role, no default image, a malformed podTemplate.
    """
    pool = dep.spec.pools[number]
    path = f"spec.pools[{number}]"
    if pool.role not in ("worker", "renderer"):
        raise SpecError([(f"{path}.role", f"{pool.role} pools cannot be deployed by this release")])
    if pool.shared_memory.scope != "pod":
        raise SpecError([(f"{path}.sharedMemory.scope", "scope node cannot be deployed by this release")])
    selector = {common.DEPLOYMENT_LABEL: dep.metadata.name, common.POOL_LABEL: pool.name}
    marks = selector | {common.ROLE_LABEL: pool.role}
    template = {
        "metadata": {
            "labels": common.labels(dep, "engine") | marks,
            "annotations": {common.CONFIG_HASH: pool_hash(dep, pool), common.SECRET_HASH: fingerprint(secrets)},
        },
        "spec": _pod(dep, pool, path),
    }
    updates = pool.updates
    surge = {"maxSurge": updates.max_surge, "maxUnavailable": updates.max_unavailable}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.object_metadata(dep, f"{dep.metadata.name}-{pool.name}", "engine", marks),
        "spec": {
            "replicas": pool.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": surge},
            "progressDeadlineSeconds": STARTUP_SECONDS + 600,
            "template": common.finish(template, pool.pod_template, f"{path}.podTemplate"),
        },
    }


def _pod(dep: MMRouterDeployment, pool: Pool, path: str) -> dict[str, Any]:
    accelerator, row = pool.accelerator, ACCELERATORS[pool.accelerator.kind]
    followed = pool.role != "renderer"
    tolerations = [
        toleration.model_dump(mode="json", by_alias=True, exclude_unset=True) for toleration in pool.tolerations
    ]
    if row.resource is not None:
        tolerations.insert(0, {"key": row.resource, "operator": "Exists", "effect": "NoSchedule"})
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": common.pod_security(),
        # The engine lets running requests finish for as long as it was told to drain.
        "terminationGracePeriodSeconds": pool.updates.drain_seconds + STOP_SECONDS,
        "nodeSelector": {**row.node_selector, **pool.node_selector},
        "tolerations": tolerations,
        **({"initContainers": [_sidecar(dep, pool)]} if followed else {}),
        "containers": [_engine(dep, pool, path)],
        "volumes": [
            *([common.config_volume(dep, SIDECAR_ITEMS)] if followed else []),
            *_engine_config_volume(dep),
            *common.model_volume(dep),
            *([] if dep.spec.model.volume is not None else [{"name": "hub", "emptyDir": {}}]),
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": pool.shared_memory.size}},
            *([{"name": "state", "emptyDir": {}}] if followed else []),
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if accelerator.claims:
        pod["resourceClaims"] = [
            claim.model_dump(mode="json", by_alias=True, exclude_none=True) for claim in accelerator.claims
        ]
    return pod


def _sidecar(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Native sidecar: it is up, and its sockets are bound, before the engine starts."""
    return {
        "name": "sidecar",
        "image": common.IMAGE,
        "restartPolicy": "Always",
        "command": ["mmrouter", "sidecar"],
        "env": [
            *common.downward_env(),
            common.value_env("MMROUTER_POOL", pool.name),
            *common.config_env(),
            common.value_env("MMROUTER_STATE_DIR", STATE_DIR),
        ],
        "ports": [
            {"name": "feed", "containerPort": FEED_PORT, "protocol": "TCP"},
            {"name": "feed-requests", "containerPort": FEED_REQUESTS_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": common.METRICS_PORT, "protocol": "TCP"},
        ],
        # "Sockets are open", not "the engine is up": the engine starts only after this.
        "startupProbe": common.probe("/healthz", "metrics", period=1, failures=60),
        "readinessProbe": common.probe("/readyz", "metrics", period=5, failures=2),
        "livenessProbe": common.probe("/healthz", "metrics", period=10, failures=6),
        "resources": dep.spec.sidecar.resources.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "securityContext": common.container_security(),
        "volumeMounts": [
            common.mount("config", CONFIG_DIR, read_only=True),
            *(common.model_mount(dep) or [common.mount("hub", HUB_CACHE_DIR, read_only=True)]),
            common.mount("state", STATE_DIR),
        ],
    }


def _engine(dep: MMRouterDeployment, pool: Pool, path: str) -> dict[str, Any]:
    launch = adapter(dep.spec.engine.type).launch(dep, pool)
    startup = common.probe(launch.health_path, "http", period=5, failures=STARTUP_SECONDS // 5)
    mounts = [*(common.model_mount(dep) or [common.mount("hub", HUB_CACHE_DIR)])]
    if dep.spec.engine.chat_template is not None:
        mounts.append(common.mount("engine-config", CONFIG_DIR, read_only=True))
    mounts += [common.mount("shm", "/dev/shm"), common.mount("tmp", "/tmp")]  # noqa: S108 - paths in the pod
    return {
        "name": "engine",
        "image": _image(dep, pool, path),
        "command": launch.command,
        "args": launch.args,
        "env": _engine_env(dep, pool, launch.env),
        "ports": [{"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"}],
        "startupProbe": startup,
        "readinessProbe": common.probe(launch.health_path, "http", period=5, failures=2),
        "livenessProbe": common.probe(launch.health_path, "http", period=20, failures=6, timeout=10),
        "resources": _resources(pool),
        "securityContext": common.container_security(),
        "volumeMounts": mounts,
    }


def _image(dep: MMRouterDeployment, pool: Pool, path: str) -> str:
    kind = pool.accelerator.kind
    row = ACCELERATORS[kind]
    default = row.sglang_image if dep.spec.engine.type == "sglang" else row.vllm_image
    image = pool.image or dep.spec.engine.image or default
    if not image:
        raise SpecError(
            [(f"{path}.image", f"there is no default engine image for {kind}: name one here or in engine.image")]
        )
    return image


def _engine_env(dep: MMRouterDeployment, pool: Pool, engine: dict[str, str]) -> list[dict[str, Any]]:
    """Return the engine's environment: the wiring, its key, and writable places for what it caches."""
    key = {"secretKeyRef": {"name": common.secret_name(dep), "key": ENGINE_KEY}}
    env = [
        *common.downward_env(),
        common.value_env("MMROUTER_POOL", pool.name),
        {"name": adapter(dep.spec.engine.type).API_KEY_ENV, "valueFrom": key},
        *(common.value_env(name, value) for name, value in engine.items()),
        # The root is read-only and the user has no entry in /etc/passwd.
        common.value_env("HOME", "/tmp"),  # noqa: S108
        common.value_env("USER", "mmrouter"),
        common.value_env("XDG_CACHE_HOME", "/tmp/cache"),  # noqa: S108
        common.value_env("TORCHINDUCTOR_CACHE_DIR", "/tmp/inductor"),  # noqa: S108
        common.value_env("TRITON_CACHE_DIR", "/tmp/triton"),  # noqa: S108
    ]
    if dep.spec.model.volume is not None:
        env.append(common.value_env("HF_HUB_OFFLINE", "1"))
    else:
        env.append(common.value_env("HF_HOME", HUB_CACHE_DIR))
    if dep.spec.model.token_secret is not None:
        token = dep.spec.model.token_secret
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return env


def _engine_config_volume(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the engine's own configuration volume: it holds the chat template and no secret."""
    sources = common.template_sources(dep)
    return [{"name": "engine-config", "projected": {"defaultMode": 0o440, "sources": sources}}] if sources else []


def _resources(pool: Pool) -> dict[str, Any]:
    resources: dict[str, Any] = pool.resources.model_dump(mode="json", by_alias=True, exclude_unset=True)
    accelerator = pool.accelerator
    if accelerator.claims:
        resources["claims"] = [{"name": claim.name} for claim in accelerator.claims]
    elif accelerator.devices:
        name = accelerator.resource_name or ACCELERATORS[accelerator.kind].resource
        # Extended resources go into limits; requests follow them.
        resources["limits"] = {**resources.get("limits", {}), name: str(accelerator.devices)}
    return resources
