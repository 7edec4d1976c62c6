"""What the children share: names, labels, environment, volumes, security."""

import copy
from collections.abc import Iterable
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_lib.api.base import Resources
from mmrouter_lib.api.paths import CONFIG_DIR, MODEL_DIR
from mmrouter_operator.render.pod.template_types import volume_faults

USER = 65532
DEPLOYMENT_LABEL = "mmrouter.io/deployment"
POOL_LABEL = "mmrouter.io/pool"
ROLE_LABEL = "mmrouter.io/role"
FRONTEND_ROLE = "frontend"
TEMPLATE_HASH = "mmrouter.io/template-hash"
"""Annotation of pod templates: the hash of their inputs (:mod:`mmrouter_operator.render.pod.template_inputs`)."""
COMPATIBILITY = "mmrouter.io/compatibility"
"""Label of engine pods; engines with equal values can read each other's KV blocks."""

METRICS_PORT = 9090

READ_ONLY_SOURCES = frozenset(
    {
        "azureDisk",
        "azureFile",
        "cephfs",
        "cinder",
        "csi",
        "fc",
        "flexVolume",
        "glusterfs",
        "iscsi",
        "nfs",
        "persistentVolumeClaim",
        "portworxVolume",
        "rbd",
    }
)
"""Volume sources that say themselves whether they are read-only."""


def frontend_name(dep: MMRouterDeployment) -> str:
    """Name of the frontend's Deployment."""
    return f"{dep.metadata.name}-frontend"


def config_name(dep: MMRouterDeployment) -> str:
    """Name of the ConfigMap."""
    return f"{dep.metadata.name}-config"


def secret_name(dep: MMRouterDeployment) -> str:
    """Name of the Secret."""
    return f"{dep.metadata.name}-secrets"


def labels(dep: MMRouterDeployment, component: str) -> dict[str, str]:
    """Return the labels of every child."""
    return {
        "app.kubernetes.io/name": "mmrouter",
        "app.kubernetes.io/instance": dep.metadata.name,
        "app.kubernetes.io/component": component,
        "app.kubernetes.io/part-of": "mmrouter",
        "app.kubernetes.io/managed-by": "mmrouter-operator",
        DEPLOYMENT_LABEL: dep.metadata.name,
    }


def object_metadata(
    dep: MMRouterDeployment, name: str, component: str, more: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the metadata of a child; with an owner, where the resource has an identity in a cluster."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": dep.metadata.namespace,
        "labels": labels(dep, component) | (more or {}),
    }
    if dep.metadata.uid:
        metadata["ownerReferences"] = [
            {
                "apiVersion": dep.api_version,
                "kind": dep.kind,
                "name": dep.metadata.name,
                "uid": dep.metadata.uid,
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ]
    return metadata


def downward_env() -> list[dict[str, Any]]:
    """Return what every container is told about its pod. The loopback stands apart: a local pod has another."""

    def own(name: str, path: str) -> dict[str, Any]:
        return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

    return [
        own("POD_NAME", "metadata.name"),
        own("POD_UID", "metadata.uid"),
        own("POD_IP", "status.podIP"),
        own("NODE_NAME", "spec.nodeName"),
        value_env("POD_LOOPBACK", "127.0.0.1"),
    ]


def value_env(name: str, value: str) -> dict[str, Any]:
    """Return one plain environment variable."""
    return {"name": name, "value": value}


def config_env() -> list[dict[str, Any]]:
    """Return where our own processes find their files."""
    return [value_env("MMROUTER_CONFIG", CONFIG_DIR), value_env("MMROUTER_MODEL_DIR", MODEL_DIR)]


def config_volume(dep: MMRouterDeployment, secret_items: Iterable[str]) -> dict[str, Any]:
    """Return the one volume that becomes :data:`CONFIG_DIR`: resource, chat template and the named secrets."""
    sources: list[dict[str, Any]] = [
        {"configMap": {"name": config_name(dep), "items": [{"key": "deployment.json", "path": "deployment.json"}]}},
        {
            "secret": {
                "name": secret_name(dep),
                "items": [{"key": item, "path": f"secrets/{item}"} for item in secret_items],
            }
        },
        *template_sources(dep),
    ]
    # The group may read: the pod's fsGroup is the processes' own.
    return {"name": "config", "projected": {"defaultMode": 0o440, "sources": sources}}


def template_sources(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the projection of the chat template, where one is set, below :data:`CONFIG_DIR`."""
    template = dep.spec.engine.chat_template
    if template is None:
        return []
    item = {"key": template.config_map.key, "path": "chat-template/template.jinja"}
    return [{"configMap": {"name": template.config_map.name, "items": [item]}}]


def model_volume(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the volume with the model's files, where one is set. Raises ``SpecError`` for a malformed one.

    A mount that is read-only does not keep the kubelet from giving the files to the pod's group: it changes the owner
    of everything in a volume, unless the volume itself is read-only.
    """
    source = dep.spec.model.volume
    if source is None:
        return []
    if faults := volume_faults(source):
        raise SpecError([(f"spec.model.volume.{place}", sentence) for place, sentence in faults])
    said = {kind: {**copy.deepcopy(fields), **_read_only(kind)} for kind, fields in source.items()}
    return [{"name": "model", **said}]


def _read_only(source: str) -> dict[str, bool]:
    return {"readOnly": True} if source in READ_ONLY_SOURCES else {}


def resources(section: Resources) -> dict[str, Any]:
    """Return a container's resources; what is empty stays out, so that a default written out changes nothing."""
    found: dict[str, Any] = section.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return found


def hub_env(dep: MMRouterDeployment, endpoint: str) -> list[dict[str, Any]]:
    """Return what a container needs to download from the hub: a mirror's URL and the token, where there are any."""
    env = [value_env("HF_ENDPOINT", endpoint)] if endpoint else []
    if dep.spec.model.token_secret is not None:
        token = dep.spec.model.token_secret
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return env


def model_mount(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return its read-only mount."""
    return [] if dep.spec.model.volume is None else [mount("model", MODEL_DIR, read_only=True)]


def mount(volume: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    """Return a volume mount."""
    return {"name": volume, "mountPath": path, **({"readOnly": True} if read_only else {})}


def probe(path: str, port: str, *, period: int, failures: int, timeout: int = 5) -> dict[str, Any]:
    """Return an HTTP probe (seconds; ``port`` by name)."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def last_words() -> dict[str, str]:
    """Return what has the kubelet keep the end of a failed container's log: the pod's status then says what of."""
    return {"terminationMessagePolicy": "FallbackToLogsOnError"}


def container_security() -> dict[str, Any]:
    """Return a container's part of the Pod Security level `restricted`, and a read-only root besides."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def pod_security() -> dict[str, Any]:
    """Return a pod's part of the Pod Security level `restricted`."""
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
