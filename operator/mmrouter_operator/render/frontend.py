"""The frontend's Deployment: pods that run the router."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.api.paths import API_KEYS_DIR, CONFIG_DIR, MODEL_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.render import common
from mmrouter_operator.render.pod import placement, probes, shared_memory
from mmrouter_operator.render.pod.template_inputs import frontend_inputs
from mmrouter_operator.render.pod.template_overlay import Finished, finish
from mmrouter_operator.render.secret import ROUTER_ITEMS
from mmrouter_operator.render.serviceaccount import frontend_account

HTTP_PORT: Final = 8000
CONTROL_PORT: Final = 8001
STREAM_SECONDS: Final = 300
"""How long answers may take to finish after SIGTERM. A pod without streams does not wait for it."""
STEADY_SECONDS: Final = 2
"""How long a new pod must stay Ready to count."""
PROGRESS_SECONDS: Final = 600


def frontend_selector(dep: MMRouterDeployment) -> dict[str, str]:
    """Return the labels by which Deployment and Service find the frontend's pods. They can never change."""
    return {common.DEPLOYMENT_LABEL: dep.metadata.name, common.ROLE_LABEL: common.FRONTEND_ROLE}


def render_frontend(dep: MMRouterDeployment, secrets: str, config: OperatorConfig) -> dict[str, Any]:
    """Return the Deployment. ``secrets`` is the Secret's fingerprint. Raises ``SpecError`` for a bad podTemplate."""
    selector = frontend_selector(dep)
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.object_metadata(dep, common.frontend_name(dep), "frontend", selector),
        "spec": {
            "replicas": dep.spec.frontend.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "minReadySeconds": STEADY_SECONDS,
            "progressDeadlineSeconds": PROGRESS_SECONDS,
            "template": frontend_template(dep, secrets, config).template,
        },
    }


def frontend_template(dep: MMRouterDeployment, secrets: str, config: OperatorConfig) -> Finished:
    """Return the pod template. Raises ``SpecError``."""
    template = {
        "metadata": {
            "labels": common.labels(dep, "frontend") | frontend_selector(dep),
            "annotations": {common.TEMPLATE_HASH: frontend_inputs(dep, secrets)},
        },
        "spec": _pod(dep, config),
    }
    return finish(template, dep.spec.frontend.pod_template, "spec.frontend.podTemplate")


def _pod(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    from_hub, shared = dep.spec.model.volume is None, shared_memory.frontends_share(dep)
    init = [*([shared_memory.prepare(config)] if shared else []), *([_model_metadata(dep, config)] if from_hub else [])]
    volumes = [
        common.config_volume(dep, ROUTER_ITEMS),
        *(common.model_volume(dep) or [{"name": "model", "emptyDir": {"sizeLimit": "1Gi"}}]),
        *([shared_memory.shared_volume(dep, config)] if shared else []),
        {"name": "tmp", "emptyDir": {}},
    ]
    if dep.spec.frontend.api_keys is not None:
        secret = {"secretName": dep.spec.frontend.api_keys.secret.name, "defaultMode": 0o440}
        volumes.append({"name": "api-keys", "secret": secret})
    return {
        "serviceAccountName": frontend_account(dep),
        "automountServiceAccountToken": True,  # the router watches the engine pods
        "enableServiceLinks": False,
        "securityContext": common.pod_security() | (shared_memory.groups() if shared else {}),
        "terminationGracePeriodSeconds": probes.NOTICE_SECONDS + STREAM_SECONDS + probes.STOP_SECONDS,
        **({"affinity": placement.near_engines(dep)} if shared else {}),
        "topologySpreadConstraints": placement.spread(frontend_selector(dep)),
        **({"initContainers": init} if init else {}),
        "containers": [_router(dep, config)],
        "volumes": volumes,
    }


def _router(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    shared = shared_memory.frontends_share(dep)
    mounts = [common.mount("config", CONFIG_DIR, read_only=True), common.mount("model", MODEL_DIR, read_only=True)]
    if dep.spec.frontend.api_keys is not None:
        mounts.append(common.mount("api-keys", API_KEYS_DIR, read_only=True))
    if shared:
        mounts.append(shared_memory.shared_mount())
    return {
        "name": "router",
        "image": config.image,
        "command": ["mmrouter", "router"],
        "env": [
            *common.downward_env(),
            *common.config_env(),
            common.value_env("MMROUTER_DISCOVERY", "kubernetes"),
            common.value_env("MMROUTER_BIND", "all"),
            common.value_env("MMROUTER_DRAIN_SECONDS", str(STREAM_SECONDS)),
            *(shared_memory.shared_env(dep, dep.spec.frontend.resources) if shared else []),
            *_tracing_env(dep),
        ],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": common.METRICS_PORT, "protocol": "TCP"},
        ],
        # Readiness speaks of the router alone: a rollout of workers must not take the endpoint away.
        **probes.our_probes(readiness_period=2),
        "lifecycle": probes.announce_by_waiting(),
        "resources": common.resources(dep.spec.frontend.resources),
        **common.last_words(),
        "securityContext": common.container_security(),
        "volumeMounts": [*mounts, common.mount("tmp", "/tmp")],  # noqa: S108 - a path in the pod
    }


def _tracing_env(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return what OpenTelemetry's SDK reads, where traces are wanted; names of ``common.downward_env`` are expanded.

    A ``podTemplate`` can change any of it and add the rest, a sampler for one.
    """
    endpoint = dep.spec.observability.otlp_endpoint
    if not endpoint:
        return []
    about = {
        "k8s.namespace.name": dep.metadata.namespace,
        "k8s.deployment.name": common.frontend_name(dep),
        "k8s.pod.name": "$(POD_NAME)",
        "k8s.pod.uid": "$(POD_UID)",
        "k8s.node.name": "$(NODE_NAME)",
        "service.instance.id": "$(POD_UID)",
    }
    return [
        common.value_env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        common.value_env("OTEL_SERVICE_NAME", common.frontend_name(dep)),
        common.value_env("OTEL_RESOURCE_ATTRIBUTES", ",".join(f"{key}={value}" for key, value in about.items())),
    ]


def _model_metadata(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    """Return the init container that fetches the model's metadata files, and none of its weights, from the hub."""
    return {
        "name": "model-metadata",
        "image": config.image,
        "command": ["mmrouter", "fetch-metadata"],
        "env": [
            *common.config_env(),
            common.value_env("HOME", "/tmp"),  # noqa: S108
            *common.hub_env(dep, config.hub_endpoint),
        ],
        "resources": common.resources(dep.spec.frontend.resources),
        **common.last_words(),
        "securityContext": common.container_security(),
        "volumeMounts": [
            common.mount("config", CONFIG_DIR, read_only=True),
            common.mount("model", MODEL_DIR),
            common.mount("tmp", "/tmp"),  # noqa: S108 - a path in the pod
        ],
    }
