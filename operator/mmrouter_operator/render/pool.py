"""A pool's Deployment: engine pods, each with the sidecar that reads its events.

Renderers have no cache and therefore no sidecar: the frontends probe them directly (docs/architecture.md).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.engines.base.launch import uses_plugin
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import SIDECAR_ITEMS
from mmrouter_operator.model.kinds import COMPATIBILITY, ENGINE_TLS, GATES, INPUTS_HASH, ROLE_LABEL, SHARED_MEMORY
from mmrouter_operator.render.child import ChildKind, RenderInputs, labels, object_metadata, pool_name, pool_pods
from mmrouter_operator.render.pod import embedding_volume, engine_tls, parts, shared_memory
from mmrouter_operator.render.pod.engine import (
    deliver_plugin,
    engine,
    engine_image,
    plugin_volume,
    sidecar,
    startup_seconds,
)
from mmrouter_operator.render.pod.kv_compatibility import layout_label
from mmrouter_operator.render.pod.spec_hashes import compatibility, kv_layout, partners, pool_inputs
from mmrouter_operator.render.pod.template_overlay import FinishedTemplate, finish
from mmrouter_operator.render.serviceaccount import engine_account

KIND: Final = ChildKind("Deployment", "apps/v1", wave=3, guard="removal", local=True)
"""The frontend's Deployment is of this kind, too."""

STEADY_SECONDS: Final = 2
"""How long a new pod must stay Ready to count: long enough to notice a crash at the first request."""
SLACK_SECONDS: Final = 600
"""Time for scheduling, pulling an image and mounting before an engine starts."""


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the Deployments of all pools.

    Raises ``SpecError`` for what cannot be rendered: a role that the engine does not have on the accelerator, no
    default image, a malformed podTemplate.
    """
    return [_deployment(inputs, number) for number in range(len(inputs.dep.spec.pools))]


def _deployment(inputs: RenderInputs, number: int) -> dict[str, Any]:
    dep = inputs.dep
    pool = dep.spec.pools[number]
    selector = pool_pods(dep, pool)
    return KIND.manifest(
        object_metadata(dep, pool_name(dep, pool), "engine", selector["matchLabels"] | {ROLE_LABEL: pool.role}),
        spec={
            "replicas": pool.replicas,
            "selector": selector,
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": pool.updates.max_surge, "maxUnavailable": pool.updates.max_unavailable},
            },
            "minReadySeconds": STEADY_SECONDS,
            "progressDeadlineSeconds": startup_seconds(pool) + dep.spec.verification.timeout_seconds + SLACK_SECONDS,
            "template": pool_template(dep, number, inputs.keys, inputs.config).template,
        },
    )


def pool_template(dep: MMRouterDeployment, number: int, keys: str, config: OperatorConfig) -> FinishedTemplate:
    """Return the pod template of ``dep.spec.pools[number]``. ``keys`` is the Secret's fingerprint.

    Raises ``SpecError``.
    """
    pool = dep.spec.pools[number]
    path = _path(number)
    container = engine(dep, pool, path, config)
    template = {
        "metadata": {
            "labels": {
                **labels(dep, "engine"),
                **pool_pods(dep, pool)["matchLabels"],
                ROLE_LABEL: pool.role,
                **({SHARED_MEMORY: "node"} if shared_memory.is_shared(pool) else {}),
                **({ENGINE_TLS: "true"} if dep.spec.engine.tls is not None else {}),
                COMPATIBILITY: _compatibility(dep, pool, config),
                **layout_label(dep, pool),
            },
            "annotations": {INPUTS_HASH: pool_inputs(dep, pool, keys)},
        },
        "spec": _pod(dep, pool, container, config),
    }
    return finish(template, pool.pod_template, f"{path}.podTemplate")


def _compatibility(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> str:
    paths = {other.name: _path(number) for number, other in enumerate(dep.spec.pools)}
    return compatibility(
        kv_layout(dep, partner, engine_image(dep, partner, paths[partner.name], config))
        for partner in partners(dep, pool)
    )


def _path(number: int) -> str:
    return f"spec.pools[{number}]"


def _pod(dep: MMRouterDeployment, pool: Pool, container: dict[str, Any], config: OperatorConfig) -> dict[str, Any]:
    has_sidecar, shared, plugged = pool.role != "renderer", shared_memory.is_shared(pool), uses_plugin(dep)
    tls = dep.spec.engine.tls
    init = [
        *(shared_memory.prepare(dep, config) if shared else []),
        *([deliver_plugin(config)] if plugged else []),
        *([engine_tls.copier(config)] if tls is not None else []),
        *([sidecar(dep, pool, config)] if has_sidecar else []),
    ]
    affinity = parts.affinity(dep, pool)
    template = parts.template_sources(dep)  # the engine's own volume has no secret
    pod: dict[str, Any] = {
        "serviceAccountName": engine_account(dep),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": parts.pod_security() | (shared_memory.groups(dep) if shared else {}),
        # Running requests may finish within drainSeconds.
        "terminationGracePeriodSeconds": parts.NOTICE_SECONDS + pool.updates.drain_seconds + parts.STOP_SECONDS,
        "readinessGates": [{"conditionType": gate} for gate in GATES],
        "nodeSelector": dict(pool.node_selector),
        "tolerations": parts.tolerations(pool),
        **({"affinity": affinity} if affinity else {}),
        "topologySpreadConstraints": parts.spread(pool_pods(dep, pool), together=shared),
        **({"initContainers": init} if init else {}),
        "containers": [container],
        "volumes": [
            *([parts.config_volume(dep, SIDECAR_ITEMS)] if has_sidecar else []),
            *(
                [{"name": "engine-config", "projected": {"defaultMode": 0o440, "sources": template}}]
                if template
                else []
            ),
            *(parts.model_volume(dep) or [{"name": "hub", "emptyDir": {}}]),
            shared_memory.own_volume(pool),
            *([shared_memory.shared_volume(dep, config)] if shared else []),
            *([embedding_volume.volume(dep)] if embedding_volume.is_used(dep, pool) else []),
            *([plugin_volume()] if plugged else []),
            *(engine_tls.volumes(tls.secret_name) if tls is not None else []),
            *([{"name": "state", "emptyDir": {}}] if has_sidecar else []),
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if pool.accelerator.claims:
        pod["resourceClaims"] = [
            claim.model_dump(mode="json", by_alias=True, exclude_none=True) for claim in pool.accelerator.claims
        ]
    return pod
