"""What the children share: names, labels, environment, security, and the pod template's last step."""

from collections.abc import Iterable
from typing import Any

import mmrouter
from mmrouter.api import MMRouterDeployment, SpecError
from mmrouter.api.paths import CONFIG_DIR, MODEL_DIR
from mmrouter_operator.render.overlay import OverlayError, overlay

IMAGE = f"mmrouter/mmrouter:{mmrouter.__version__}"
"""Image of router and sidecar."""

USER = 65532
DEPLOYMENT_LABEL = "mmrouter.io/deployment"
POOL_LABEL = "mmrouter.io/pool"
ROLE_LABEL = "mmrouter.io/role"
FRONTEND_ROLE = "frontend"
CONFIG_HASH = "mmrouter.io/config-hash"
SECRET_HASH = "mmrouter.io/secret-hash"  # noqa: S105 - an annotation's name

METRICS_PORT = 9090


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
    """Return the volume with the model's files, where one is set."""
    return [] if dep.spec.model.volume is None else [{"name": "model", **dep.spec.model.volume}]


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


def container_security() -> dict[str, Any]:
    """Return a container's part of the Pod Security level `restricted`, and a read-only root besides."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


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


def finish(template: dict[str, Any], patch: dict[str, Any], path: str) -> dict[str, Any]:
    """Return a pod template with the user's patch over it and what we cannot do without put back.

    ``path`` is the patch's field in the resource. Raises :class:`SpecError` for a malformed patch and for one that
    takes a container of ours away. Our labels are put back, and our environment variables come first again, because
    ``$(VAR)`` sees only what stands before it.
    """
    if not patch:
        return template
    try:
        merged = overlay(template, patch)
    except OverlayError as error:
        raise SpecError([(f"{path}.{error.path}" if error.path else path, str(error))]) from error
    merged.setdefault("metadata", {}).setdefault("labels", {}).update(template["metadata"]["labels"])
    merged["metadata"].setdefault("annotations", {}).update(template["metadata"]["annotations"])
    for kind in ("initContainers", "containers"):
        patched = {container.get("name"): container for container in merged.get("spec", {}).get(kind) or []}
        for ours in template["spec"].get(kind, []):
            if ours["name"] not in patched:
                raise SpecError([(f"{path}.spec.{kind}", f"container `{ours['name']}` cannot be removed")])
            theirs = patched[ours["name"]]
            theirs["env"] = _ours_first([item["name"] for item in ours["env"]], theirs.get("env") or [])
    return merged


def _ours_first(names: list[str], env: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name = {item["name"]: item for item in env}
    return [by_name[name] for name in names if name in by_name] + [item for item in env if item["name"] not in names]
