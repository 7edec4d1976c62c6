"""Parts that several pod templates share: environment, volumes, probes and security."""

import copy
from collections.abc import Iterable
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, SpecError
from mmrouter_lib.api.pod_paths import CONFIG_DIR, MODEL_DIR
from mmrouter_lib.api.shared_types import Resources
from mmrouter_operator.render.metadata import config_name, secret_name
from mmrouter_operator.render.pod.template_validation import volume_faults

USER = 65532
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
"""Volume sources with a ``readOnly`` field of their own."""


def downward_env() -> list[dict[str, Any]]:
    """Return the variables about the pod itself. Its loopback is a variable because a local pod has another one."""

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
    """Return the variables by which our own processes find their files."""
    return [value_env("MMROUTER_CONFIG", CONFIG_DIR), value_env("MMROUTER_MODEL_DIR", MODEL_DIR)]


def config_volume(dep: MMRouterDeployment, secret_items: Iterable[str]) -> dict[str, Any]:
    """Return the volume of :data:`CONFIG_DIR`: resource, chat template and the named entries of the Secret."""
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
    # Readable for the group: the pod's fsGroup is the processes' own.
    return {"name": "config", "projected": {"defaultMode": 0o440, "sources": sources}}


def template_sources(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the projection of the chat template below :data:`CONFIG_DIR`; empty if none is set."""
    template = dep.spec.engine.chat_template
    if template is None:
        return []
    item = {"key": template.config_map.key, "path": "chat-template/template.jinja"}
    return [{"configMap": {"name": template.config_map.name, "items": [item]}}]


def model_volume(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the volume with the model's files; empty if none is set. Raises ``SpecError`` for a malformed one.

    The volume source itself is made read-only, not just its mount: otherwise the kubelet changes the group of every
    file in it to the pod's ``fsGroup``.
    """
    source = dep.spec.model.volume
    if source is None:
        return []
    if faults := volume_faults(source):
        raise SpecError([(f"spec.model.volume.{place}", sentence) for place, sentence in faults])
    volume = {kind: {**copy.deepcopy(fields), **_read_only(kind)} for kind, fields in source.items()}
    return [{"name": "model", **volume}]


def _read_only(source: str) -> dict[str, bool]:
    return {"readOnly": True} if source in READ_ONLY_SOURCES else {}


def resources(section: Resources) -> dict[str, Any]:
    """Return a container's resources without empty fields, so that writing out a default changes nothing."""
    fields: dict[str, Any] = section.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return fields


def hub_env(dep: MMRouterDeployment, endpoint: str) -> list[dict[str, Any]]:
    """Return the variables for downloads from the hub: the mirror's URL and the token, as far as they are set."""
    env = [value_env("HF_ENDPOINT", endpoint)] if endpoint else []
    if dep.spec.model.token_secret is not None:
        token = dep.spec.model.token_secret
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return env


def model_mount(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the read-only mount of the model's volume; empty if none is set."""
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


def termination_message() -> dict[str, str]:
    """Return the setting that puts the end of a failed container's log into the pod's status."""
    return {"terminationMessagePolicy": "FallbackToLogsOnError"}


def container_security() -> dict[str, Any]:
    """Return a container's part of the Pod Security level `restricted`, and a read-only root."""
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
