"""A pool's Deployment: engine pods, each with the sidecar that reads its events.

Renderers have no cache, so they have no sidecar: the frontends ask them and see for themselves (docs/architecture.md).
"""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool
from mmrouter_lib.engines.base.launch import takes_plugin
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render import common
from mmrouter_operator.render.kv_layouts import layout_label
from mmrouter_operator.render.pod import handover_plugin as plugin
from mmrouter_operator.render.pod import placement, probes, shared_memory
from mmrouter_operator.render.pod.engine import engine, engine_image, startup_seconds
from mmrouter_operator.render.pod.sidecar import FEED_PORT, FEED_REQUESTS_PORT, sidecar
from mmrouter_operator.render.pod.template_inputs import compatibility, kv_layout, partners, pool_inputs
from mmrouter_operator.render.pod.template_overlay import Finished, finish
from mmrouter_operator.render.secret import SIDECAR_ITEMS
from mmrouter_operator.render.serviceaccount import engine_account

__all__ = ["FEED_PORT", "FEED_REQUESTS_PORT", "pool_template", "render_pool"]

GATES: Final = ("mmrouter.io/routable", "mmrouter.io/verified")
"""Readiness gates, for every role (docs/architecture.md). Pods keep the list that they were made with."""
STEADY_SECONDS: Final = 2
"""How long a new pod must stay Ready to count: long enough to see one that falls over at its first request."""
SLACK_SECONDS: Final = 600
"""What scheduling, pulling an image and mounting may take before an engine starts."""


def render_pool(dep: MMRouterDeployment, number: int, secrets: str, config: OperatorConfig) -> dict[str, Any]:
    """Return the Deployment of ``dep.spec.pools[number]``. ``secrets`` is the Secret's fingerprint.

    Raises ``SpecError`` for what cannot be rendered: a role that the engine does not have on the accelerator, no
    default image, a malformed podTemplate.
    """
    pool = dep.spec.pools[number]
    selector = _selector(dep, pool)
    updates = pool.updates
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.object_metadata(
            dep, f"{dep.metadata.name}-{pool.name}", "engine", selector | {common.ROLE_LABEL: pool.role}
        ),
        "spec": {
            "replicas": pool.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {
                "type": "RollingUpdate",
                "rollingUpdate": {"maxSurge": updates.max_surge, "maxUnavailable": updates.max_unavailable},
            },
            "minReadySeconds": STEADY_SECONDS,
            "progressDeadlineSeconds": startup_seconds(pool) + dep.spec.verification.timeout_seconds + SLACK_SECONDS,
            "template": pool_template(dep, number, secrets, config).template,
        },
    }


def pool_template(dep: MMRouterDeployment, number: int, secrets: str, config: OperatorConfig) -> Finished:
    """Return the pod template of ``dep.spec.pools[number]``. Raises ``SpecError``."""
    pool = dep.spec.pools[number]
    path = _path(number)
    container = engine(dep, pool, path, config)
    labels = common.labels(dep, "engine") | _selector(dep, pool) | {common.ROLE_LABEL: pool.role}
    if shared_memory.is_shared(pool):
        labels[placement.SHARED_MEMORY_LABEL] = "node"
    template = {
        "metadata": {
            "labels": labels | {common.COMPATIBILITY: _compatibility(dep, pool, config)} | layout_label(dep, pool),
            "annotations": {common.TEMPLATE_HASH: pool_inputs(dep, pool, secrets)},
        },
        "spec": _pod(dep, pool, container, config),
    }
    return finish(template, pool.pod_template, f"{path}.podTemplate")


def _compatibility(dep: MMRouterDeployment, pool: Pool, config: OperatorConfig) -> str:
    places = {other.name: _path(number) for number, other in enumerate(dep.spec.pools)}
    return compatibility(
        kv_layout(dep, partner, engine_image(dep, partner, places[partner.name], config))
        for partner in partners(dep, pool)
    )


def _path(number: int) -> str:
    return f"spec.pools[{number}]"


def _selector(dep: MMRouterDeployment, pool: Pool) -> dict[str, str]:
    return {common.DEPLOYMENT_LABEL: dep.metadata.name, common.POOL_LABEL: pool.name}


def _pod(dep: MMRouterDeployment, pool: Pool, container: dict[str, Any], config: OperatorConfig) -> dict[str, Any]:
    followed, shared, plugged = pool.role != "renderer", shared_memory.is_shared(pool), takes_plugin(dep)
    init = [
        *([shared_memory.prepare(config)] if shared else []),
        *([plugin.deliver(config)] if plugged else []),
        *([sidecar(dep, pool, config)] if followed else []),
    ]
    affinity = placement.affinity(dep, pool)
    pod: dict[str, Any] = {
        "serviceAccountName": engine_account(dep),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": common.pod_security() | (shared_memory.groups() if shared else {}),
        # The engine lets running requests finish for as long as it was told to drain.
        "terminationGracePeriodSeconds": probes.NOTICE_SECONDS + pool.updates.drain_seconds + probes.STOP_SECONDS,
        "readinessGates": [{"conditionType": gate} for gate in GATES],
        "nodeSelector": dict(pool.node_selector),
        "tolerations": placement.tolerations(pool),
        **({"affinity": affinity} if affinity else {}),
        "topologySpreadConstraints": placement.spread(_selector(dep, pool), together=shared),
        **({"initContainers": init} if init else {}),
        "containers": [container],
        "volumes": [
            *([common.config_volume(dep, SIDECAR_ITEMS)] if followed else []),
            *_engine_config_volume(dep),
            *(common.model_volume(dep) or [{"name": "hub", "emptyDir": {}}]),
            shared_memory.own_volume(pool),
            *([shared_memory.shared_volume(dep, config)] if shared else []),
            *([plugin.volume()] if plugged else []),
            *([{"name": "state", "emptyDir": {}}] if followed else []),
            {"name": "tmp", "emptyDir": {}},
        ],
    }
    if pool.accelerator.claims:
        pod["resourceClaims"] = [
            claim.model_dump(mode="json", by_alias=True, exclude_none=True) for claim in pool.accelerator.claims
        ]
    return pod


def _engine_config_volume(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the engine's own configuration volume: it holds the chat template and no secret."""
    sources = common.template_sources(dep)
    return [{"name": "engine-config", "projected": {"defaultMode": 0o440, "sources": sources}}] if sources else []
