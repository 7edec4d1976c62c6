"""The frontend's Deployment: pods that run the router."""

from typing import Any

from mmrouter.api import MMRouterDeployment
from mmrouter.api.paths import API_KEYS_DIR, CONFIG_DIR
from mmrouter_operator.render import common
from mmrouter_operator.render.configmap import frontend_hash
from mmrouter_operator.render.secret import ROUTER_ITEMS, SecretData, fingerprint

HTTP_PORT = 8000
CONTROL_PORT = 8001


def frontend_selector(dep: MMRouterDeployment) -> dict[str, str]:
    """Return the labels by which Deployment and Service find the frontend's pods. They can never change."""
    return {common.DEPLOYMENT_LABEL: dep.metadata.name, common.ROLE_LABEL: common.FRONTEND_ROLE}


def render_frontend(dep: MMRouterDeployment, secrets: SecretData) -> dict[str, Any]:
    """Return the Deployment. Raises ``SpecError`` for a malformed podTemplate."""
    selector = frontend_selector(dep)
    template = {
        "metadata": {
            "labels": common.labels(dep, "frontend") | selector,
            "annotations": {common.CONFIG_HASH: frontend_hash(dep), common.SECRET_HASH: fingerprint(secrets)},
        },
        "spec": _pod(dep),
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": common.object_metadata(dep, common.frontend_name(dep), "frontend", selector),
        "spec": {
            "replicas": dep.spec.frontend.replicas,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": common.finish(template, dep.spec.frontend.pod_template, "spec.frontend.podTemplate"),
        },
    }


def _pod(dep: MMRouterDeployment) -> dict[str, Any]:
    volumes = [common.config_volume(dep, ROUTER_ITEMS), *common.model_volume(dep), {"name": "tmp", "emptyDir": {}}]
    mounts = [common.mount("config", CONFIG_DIR, read_only=True), *common.model_mount(dep)]
    if dep.spec.frontend.api_keys is not None:
        secret = {"secretName": dep.spec.frontend.api_keys.secret.name, "defaultMode": 0o440}
        volumes.append({"name": "api-keys", "secret": secret})
        mounts.append(common.mount("api-keys", API_KEYS_DIR, read_only=True))
    mounts.append(common.mount("tmp", "/tmp"))  # noqa: S108 - a path in the pod
    router = {
        "name": "router",
        "image": common.IMAGE,
        "command": ["mmrouter", "router"],
        "env": [*common.downward_env(), *common.config_env()],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "control", "containerPort": CONTROL_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": common.METRICS_PORT, "protocol": "TCP"},
        ],
        # Readiness speaks of the router alone: a rollout of workers must not take the endpoint away.
        "startupProbe": common.probe("/healthz", "metrics", period=1, failures=60),
        "readinessProbe": common.probe("/readyz", "metrics", period=2, failures=2),
        "livenessProbe": common.probe("/healthz", "metrics", period=10, failures=6),
        "resources": dep.spec.frontend.resources.model_dump(mode="json", by_alias=True, exclude_unset=True),
        "securityContext": common.container_security(),
        "volumeMounts": mounts,
    }
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": common.pod_security(),
        "terminationGracePeriodSeconds": 60,
        "containers": [router],
        "volumes": volumes,
    }
