"""The frontend's Deployment: pods that run the router."""

from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_lib.pod_paths import API_KEYS_DIR, CONFIG_DIR, MODEL_DIR, TLS_DIR
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.credentials import ROUTER_ITEMS
from mmrouter_operator.model.kinds import FORMER_HASH, INPUTS_HASH
from mmrouter_operator.render.child import (
    RenderInputs,
    frontend_labels,
    frontend_name,
    frontend_pods,
    labels,
    object_metadata,
)
from mmrouter_operator.render.pod import parts, shared_memory
from mmrouter_operator.render.pod.spec_hashes import frontend_inputs
from mmrouter_operator.render.pod.template_overlay import FinishedTemplate, finish
from mmrouter_operator.render.pool import KIND

__all__ = ["CONTROL_PORT", "HTTP_PORT", "KIND", "PICKER_PORT", "frontend_template", "render"]

HTTP_PORT: Final = 8000
CONTROL_PORT: Final = 8001
PICKER_PORT: Final = 9002
STREAM_SECONDS: Final = 300
"""How long running answers may take after SIGTERM. A pod without streams ends at once."""
STEADY_SECONDS: Final = 2
"""How long a new pod must stay Ready to count."""
PROGRESS_SECONDS: Final = 600


def render(inputs: RenderInputs) -> list[dict[str, Any]]:
    """Return the frontend's Deployment. Raises ``SpecError`` for a bad podTemplate."""
    dep = inputs.dep
    metadata = object_metadata(dep, frontend_name(dep), "frontend", frontend_labels(dep))
    former = frontend_inputs(dep, inputs.keys, former=True)
    if former != frontend_inputs(dep, inputs.keys):
        metadata["annotations"] = {FORMER_HASH: former}
    spec = {
        "replicas": dep.spec.frontend.replicas,
        "selector": {"matchLabels": frontend_labels(dep)},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "minReadySeconds": STEADY_SECONDS,
        "progressDeadlineSeconds": PROGRESS_SECONDS,
        "template": frontend_template(dep, inputs.keys, inputs.config).template,
    }
    return [KIND.manifest(metadata, spec=spec)]


def frontend_template(dep: MMRouterDeployment, keys: str, config: OperatorConfig) -> FinishedTemplate:
    """Return the pod template. ``keys`` is the Secret's fingerprint. Raises ``SpecError``."""
    template = {
        "metadata": {
            "labels": labels(dep, "frontend") | frontend_labels(dep),
            "annotations": {INPUTS_HASH: frontend_inputs(dep, keys)},
        },
        "spec": _pod(dep, config),
    }
    return finish(template, dep.spec.frontend.pod_template, "spec.frontend.podTemplate")


def _pod(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    from_hub, shared = dep.spec.model.volume is None, shared_memory.frontends_share(dep)
    init = [
        *(shared_memory.prepare(dep, config) if shared else []),
        *([_model_metadata(dep, config)] if from_hub else []),
    ]
    volumes = [
        parts.config_volume(dep, ROUTER_ITEMS),
        *(parts.model_volume(dep) or [{"name": "model", "emptyDir": {"sizeLimit": "1Gi"}}]),
        *([shared_memory.shared_volume(dep, config)] if shared else []),
        {"name": "tmp", "emptyDir": {}},
    ]
    if dep.spec.frontend.api_keys is not None:
        secret = {"secretName": dep.spec.frontend.api_keys.secret.name, "defaultMode": 0o440}
        volumes.append({"name": "api-keys", "secret": secret})
    if (tls := dep.spec.frontend.tls) is not None:
        volumes.append({"name": "client-tls", "secret": {"secretName": tls.secret_name, "defaultMode": 0o440}})
    return {
        "serviceAccountName": frontend_name(dep),
        "automountServiceAccountToken": True,  # the router watches the engine pods
        "enableServiceLinks": False,
        "securityContext": parts.pod_security() | (shared_memory.groups(dep) if shared else {}),
        "terminationGracePeriodSeconds": parts.NOTICE_SECONDS + STREAM_SECONDS + parts.STOP_SECONDS,
        **({"affinity": parts.near_engines(dep)} if shared else {}),
        "topologySpreadConstraints": parts.spread(frontend_pods(dep)),
        **({"initContainers": init} if init else {}),
        "containers": [_router(dep, config)],
        "volumes": volumes,
    }


def _router(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    shared = shared_memory.frontends_share(dep)
    picker = {"picker": PICKER_PORT} if dep.spec.frontend.has_picker else {}
    mounts = [parts.mount("config", CONFIG_DIR, read_only=True), parts.mount("model", MODEL_DIR, read_only=True)]
    if dep.spec.frontend.api_keys is not None:
        mounts.append(parts.mount("api-keys", API_KEYS_DIR, read_only=True))
    if dep.spec.frontend.tls is not None:
        mounts.append(parts.mount("client-tls", TLS_DIR, read_only=True))
    if shared:
        mounts.append(shared_memory.shared_mount())
    return {
        "name": "router",
        "image": config.image,
        "command": ["mmrouter", "router"],
        "env": [
            *parts.downward_env(),
            *parts.config_env(),
            parts.value_env("MMROUTER_DISCOVERY", "kubernetes"),
            parts.value_env("MMROUTER_BIND", "all"),
            parts.value_env("MMROUTER_DRAIN_SECONDS", str(STREAM_SECONDS)),
            *(shared_memory.shared_env(dep, dep.spec.frontend.resources) if shared else []),
            *_tracing_env(dep),
        ],
        "ports": parts.ports({"http": HTTP_PORT, "control": CONTROL_PORT, "metrics": parts.METRICS_PORT, **picker}),
        # Readiness is the router's own: a rollout of workers must not remove the endpoint.
        **parts.our_probes(readiness_period=2),
        "lifecycle": parts.announce_by_waiting(),
        "resources": parts.resources(dep.spec.frontend.resources),
        **parts.hardened(),
        "volumeMounts": [*mounts, parts.mount("tmp", "/tmp")],  # noqa: S108 - a path in the pod
    }


TRACED_SHARE = "0.05"
"""Share of the requests without a trace of their own whose spans are sent: a traced request takes the router about
three times the CPU time."""


def _tracing_env(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the variables of OpenTelemetry's SDK if traces are wanted; they use those of ``parts.downward_env``.

    A ``podTemplate`` can change them and add others.
    """
    endpoint = dep.spec.observability.otlp_endpoint
    if not endpoint:
        return []
    attributes = {
        "k8s.namespace.name": dep.metadata.namespace,
        "k8s.deployment.name": frontend_name(dep),
        "k8s.pod.name": "$(POD_NAME)",
        "k8s.pod.uid": "$(POD_UID)",
        "k8s.node.name": "$(NODE_NAME)",
        "service.instance.id": "$(POD_UID)",
    }
    return [
        parts.value_env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint),
        parts.value_env("OTEL_SERVICE_NAME", frontend_name(dep)),
        parts.value_env("OTEL_RESOURCE_ATTRIBUTES", ",".join(f"{key}={value}" for key, value in attributes.items())),
        parts.value_env("OTEL_TRACES_SAMPLER", "parentbased_traceidratio"),
        parts.value_env("OTEL_TRACES_SAMPLER_ARG", TRACED_SHARE),
    ]


def _model_metadata(dep: MMRouterDeployment, config: OperatorConfig) -> dict[str, Any]:
    """Return the init container that downloads the model's metadata files (no weights) from the hub."""
    return {
        "name": "model-metadata",
        "image": config.image,
        "command": ["mmrouter", "fetch-metadata"],
        "env": [
            *parts.config_env(),
            parts.value_env("HOME", "/tmp"),  # noqa: S108
            *parts.hub_env(dep, config.hub_endpoint),
        ],
        "resources": parts.resources(dep.spec.frontend.resources),
        **parts.hardened(),
        "volumeMounts": [
            parts.mount("config", CONFIG_DIR, read_only=True),
            parts.mount("model", MODEL_DIR),
            parts.mount("tmp", "/tmp"),  # noqa: S108 - a path in the pod
        ],
    }
