"""Where a rendered pod is not within the Pod Security level ``restricted``. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from mmrouter_operator.rollout import pool_of

SHARED_VOLUME = "shared"
"""Name of the volume that ``sharedMemory.scope: node`` adds."""

_HOST = ("hostNetwork", "hostPID", "hostIPC")


def exceptions(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (reason, what, in words) of each thing in a Deployment's pods that ``restricted`` forbids."""
    pool = pool_of(manifest)
    subject = f"pool {pool}" if pool else "frontend"
    spec = manifest["spec"]["template"].get("spec") or {}
    return [(reason, f"{subject}: {text}") for reason, text in _found(spec)]


def _found(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for volume in spec.get("volumes") or []:
        if "hostPath" in volume:
            path = (volume["hostPath"] or {}).get("path", "")
            reason = "NodeSharedMemory" if volume.get("name") == SHARED_VOLUME else "HostPath"
            yield reason, f"volume {volume.get('name')} is the node's folder {path}"
    for name in _HOST:
        if spec.get(name) is True:
            yield "PodTemplate", f"{name} is on"
    pod = spec.get("securityContext") or {}
    for group in ("initContainers", "containers"):
        for container in spec.get(group) or []:
            for text in _container(container.get("securityContext") or {}, pod):
                yield "PodTemplate", f"container {container.get('name')} {text}"


def _container(own: Mapping[str, Any], pod: Mapping[str, Any]) -> Iterator[str]:
    def setting(name: str) -> Any:
        return own.get(name, pod.get(name))

    if own.get("privileged") is True:
        yield "is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if setting("runAsNonRoot") is not True or setting("runAsUser") == 0:
        yield "may run as root"
    capabilities = own.get("capabilities") or {}
    added = [name for name in capabilities.get("add") or [] if name != "NET_BIND_SERVICE"]
    if added:
        yield f"has capabilities {', '.join(added)}"
    if "ALL" not in (capabilities.get("drop") or []):
        yield "does not drop all capabilities"
    if (setting("seccompProfile") or {}).get("type") not in ("RuntimeDefault", "Localhost"):
        yield "has no seccomp profile"
