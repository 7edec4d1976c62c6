"""What in a pod keeps it from the Pod Security level `restricted`, in sentences. Pure.

The rules are those of the Pod Security Standards, ``restricted`` and the ``baseline`` below it, as far as pods for
Linux can break them: a namespace that enforces the level refuses exactly these pods.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

VOLUMES: Final = frozenset(
    (
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "image",
        "persistentVolumeClaim",
        "projected",
        "secret",
    )
)
"""Volume sources that `restricted` allows."""
SYSCTLS: Final = frozenset(
    (
        "kernel.shm_rmid_forced",
        "net.ipv4.ip_local_port_range",
        "net.ipv4.ip_local_reserved_ports",
        "net.ipv4.ip_unprivileged_port_start",
        "net.ipv4.ping_group_range",
        "net.ipv4.tcp_fin_timeout",
        "net.ipv4.tcp_keepalive_intvl",
        "net.ipv4.tcp_keepalive_probes",
        "net.ipv4.tcp_keepalive_time",
        "net.ipv4.tcp_syncookies",
    )
)
SELINUX_TYPES: Final = frozenset({"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"})
PROFILES: Final = ("RuntimeDefault", "Localhost")

Spec = Mapping[str, Any]
Violation = tuple[str, str]
"""The place within the pod, and what is wrong with it."""


def violations(pod: Spec) -> Iterator[Violation]:
    """Yield what in a pod's spec `restricted` does not allow; nothing for a pod that meets it."""
    for key in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(key):
            yield key, "the pod shares a namespace of its node"
    for volume in pod.get("volumes") or []:
        source = next((key for key in volume if key != "name"), "emptyDir")
        if source not in VOLUMES:
            yield f"volume {volume['name']}", f"{source} is not among the volumes that restricted allows"
    shared = pod.get("securityContext") or {}
    for sysctl in shared.get("sysctls") or []:
        if sysctl.get("name") not in SYSCTLS:
            yield "securityContext", f"the sysctl {sysctl.get('name')} is not safe"
    yield from _identity(shared, "pod")
    for kind in ("initContainers", "containers"):
        for container in pod.get(kind) or []:
            yield from _container(container, shared, f"container {container.get('name')}")


def _container(container: Spec, pod: Spec, place: str) -> Iterator[Violation]:
    own = container.get("securityContext") or {}
    if own.get("privileged"):
        yield place, "it is privileged"
    if own.get("allowPrivilegeEscalation") is not False:
        yield place, "allowPrivilegeEscalation is not false"
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        yield place, "it does not drop all capabilities"
    if more := sorted(set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}):
        yield place, f"it adds the capabilities {', '.join(more)}"
    if own.get("runAsNonRoot", pod.get("runAsNonRoot")) is not True:
        yield place, "runAsNonRoot is not true"
    profile = (own.get("seccompProfile") or pod.get("seccompProfile") or {}).get("type")
    if profile not in PROFILES:
        yield place, f"its seccomp profile is {profile or 'not set'}"
    if own.get("procMount", "Default") != "Default":
        yield place, f"procMount is {own['procMount']}"
    if any(port.get("hostPort") for port in container.get("ports") or []):
        yield place, "it takes a port of its node"
    yield from _identity(own, place)


def _identity(context: Spec, place: str) -> Iterator[Violation]:
    if context.get("runAsUser") == 0:
        yield place, "it runs as root"
    selinux = context.get("seLinuxOptions") or {}
    if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
        yield place, "its SELinux options are not of the allowed types"
    if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
        yield place, "its AppArmor profile is unconfined"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield place, "it is a process of its node"
