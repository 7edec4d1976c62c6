"""Parts that several pod templates share: environment, volumes, security, probes, shutdown and scheduling. Pure.

How an engine pod ends: the kubelet runs the engine's ``preStop`` hook at once, and stops the native sidecar only after
the engine has ended, so a hook of the sidecar's own would come too late. The engine's hook therefore asks the sidecar,
on the pod's loopback, to say "draining" to every router, and waits until they have heard it. Only then SIGTERM follows,
after which engines let requests finish and refuse new ones (docs/engine-facts/vllm.md#drain, on SGLang 6). Routers
also see the ``deletionTimestamp``; the sidecar's word reaches them where there is none, as when a node shuts down.
"""

import copy
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mmrouter_lib.api import MMRouterDeployment, Pool, SpecError
from mmrouter_lib.api.shared_types import Resources
from mmrouter_lib.engines.base.launch import Launch
from mmrouter_lib.pod_paths import CONFIG_DIR, ENGINE_CA_DIR, MODEL_DIR
from mmrouter_lib.tls_context import CA
from mmrouter_operator.model.accelerators import ACCELERATORS, NodeLabel
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, SHARED_MEMORY
from mmrouter_operator.render.child import Selector, config_name, secret_name
from mmrouter_operator.render.pod.template_overlay import volume_faults

USER = 65532
METRICS_PORT = 9090

READ_ONLY_SOURCES = frozenset(
    (
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
    )
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
        *_trust_sources(dep),
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


def _trust_sources(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the projection of the CA of the engines' certificates; empty if they serve no TLS."""
    if (tls := dep.spec.engine.tls) is None:
        return []
    path = Path(ENGINE_CA_DIR).relative_to(CONFIG_DIR) / CA
    return [{"secret": {"name": tls.secret_name, "items": [{"key": CA, "path": str(path)}]}}]


def model_volume(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    """Return the volume with the model's files; empty if none is set. Raises ``SpecError`` for a malformed one.

    The volume source itself is made read-only, not just its mount: otherwise the kubelet changes the group of every
    file in it to the pod's ``fsGroup``.
    """
    source = dep.spec.model.volume
    if source is None:
        return []
    volume = named_volume("model", source, "spec.model.volume")
    for kind in volume.keys() & READ_ONLY_SOURCES:
        volume[kind]["readOnly"] = True
    return [volume]


def named_volume(name: str, source: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return a pod's volume of the resource's field ``path``. Raises ``SpecError`` for a malformed source."""
    if faults := volume_faults(source):
        raise SpecError([(f"{path}.{place}", sentence) for place, sentence in faults])
    return {"name": name, **copy.deepcopy(dict(source))}


def resources(section: Resources) -> dict[str, Any]:
    """Return a container's resources without empty fields, so that writing out a default changes nothing."""
    return section.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def hub_env(dep: MMRouterDeployment, endpoint: str) -> list[dict[str, Any]]:
    """Return the variables for downloads from the hub: the mirror's URL and the token, as far as they are set."""
    env = [value_env("HF_ENDPOINT", endpoint)] if endpoint else []
    if dep.spec.model.token_secret is not None:
        token = dep.spec.model.token_secret
        env.append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": token.name, "key": token.key}}})
    return env


def model_mount(dep: MMRouterDeployment) -> list[dict[str, Any]]:
    return [] if dep.spec.model.volume is None else [mount("model", MODEL_DIR, read_only=True)]


def mount(volume: str, path: str, *, read_only: bool = False) -> dict[str, Any]:
    return {"name": volume, "mountPath": path, **({"readOnly": True} if read_only else {})}


def ports(numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return a container's TCP ports, by name."""
    return [{"name": name, "containerPort": number, "protocol": "TCP"} for name, number in numbers.items()]


def probe(path: str, port: str, *, period: int, failures: int, timeout: int = 5, tls: bool = False) -> dict[str, Any]:
    """Return an HTTP probe (seconds; ``port`` by name). With TLS the kubelet accepts any certificate."""
    return {
        "httpGet": {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})},
        "periodSeconds": period,
        "failureThreshold": failures,
        "timeoutSeconds": timeout,
    }


def container_security() -> dict[str, Any]:
    """Return a container's part of the Pod Security level `restricted`, and a read-only root."""
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def hardened() -> dict[str, Any]:
    """Return what every container has: the end of a failed one's log in the pod's status, and its security."""
    return {"terminationMessagePolicy": "FallbackToLogsOnError", "securityContext": container_security()}


def pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER,
        "runAsGroup": USER,
        "fsGroup": USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


NOTICE_SECONDS = 5
"""How long before SIGTERM a pod is announced as leaving: Services and routers stop sending to it meanwhile."""
STOP_SECONDS = 30
"""Time to stop once the requests are done."""
STARTUP_SECONDS = 300
"""How long router and sidecar may take to open their sockets.

They take seconds, and many where engines that start leave a node no CPU: to begin anew would only make that worse.
"""
DRAIN_PORT = 8002
"""The sidecar's hook, on the pod's loopback."""

# Engine images hold Python and need hold no HTTP client. The wait does not depend on the answer.
ASK_SIDECAR = f"""\
import os, sys, time, urllib.request
try:
    urllib.request.urlopen(f"http://{{os.environ['POD_LOOPBACK']}}:{DRAIN_PORT}/drain", timeout=2).read()
except OSError as error:
    print(f"drain: {{error}}", file=sys.stderr)
finally:
    time.sleep(float(sys.argv[1]))
"""


def engine_probes(launch: Launch, startup_seconds: int, *, tls: bool) -> dict[str, Any]:
    """Return an engine's probes. Liveness is patient: a restart costs the cache and minutes of loading."""
    timeout, health = launch.health_seconds, partial(probe, launch.health_path, "http", tls=tls)
    period = max(5, timeout)
    return {
        "startupProbe": health(period=period, failures=-(-startup_seconds // period), timeout=timeout),
        "readinessProbe": health(period=period, failures=3, timeout=timeout),
        "livenessProbe": health(period=max(20, timeout), failures=15, timeout=max(10, timeout)),
    }


def our_probes(readiness_period: int) -> dict[str, Any]:
    """Return the probes of router and sidecar. Started means that sockets are open, not that the engine is up."""
    return {
        "startupProbe": probe("/healthz", "metrics", period=1, failures=STARTUP_SECONDS),
        "readinessProbe": probe("/readyz", "metrics", period=readiness_period, failures=2),
        "livenessProbe": probe("/healthz", "metrics", period=10, failures=6),
    }


def announce_by_sidecar() -> dict[str, Any]:
    return {"preStop": {"exec": {"command": ["python3", "-c", ASK_SIDECAR, str(NOTICE_SECONDS)]}}}


def announce_by_waiting() -> dict[str, Any]:
    """Return the lifecycle of a container that others find by the API: it serves on while they learn that it goes."""
    return {"preStop": {"sleep": {"seconds": NOTICE_SECONDS}}}


HOSTNAME = "kubernetes.io/hostname"
ZONE = "topology.kubernetes.io/zone"


def tolerations(pool: Pool) -> list[dict[str, Any]]:
    resource = ACCELERATORS[pool.accelerator.kind].resource
    accelerator = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    own = [item.model_dump(mode="json", by_alias=True, exclude_none=True) for item in pool.tolerations]
    return [*([accelerator] if resource is not None else []), *own]


def affinity(dep: MMRouterDeployment, pool: Pool) -> dict[str, Any]:
    """Return the pod's affinity; empty if any node fits.

    A claim (DRA) selects its node by the devices themselves, without node labels.
    """
    affinity: dict[str, Any] = {}
    labels = ACCELERATORS[pool.accelerator.kind].node_labels
    if labels and not pool.accelerator.claims:
        terms = [{"matchExpressions": [_expression(label)]} for label in labels]
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    if pool.shared_memory.scope == "node":
        affinity |= near_engines(dep)
    return affinity


def near_engines(dep: MMRouterDeployment) -> dict[str, Any]:
    """Return the affinity of a pod that shares memory with engines.

    It is only preferred: a required term would tie all pools to one node, and draining that node would never end,
    because no replacement could start elsewhere. Images that cannot be handed over on the node are sent as bytes.
    """
    shared = {DEPLOYMENT_LABEL: dep.metadata.name, SHARED_MEMORY: "node"}
    term = {"labelSelector": {"matchLabels": shared}, "topologyKey": HOSTNAME}
    return {
        "podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}
    }


def spread(selector: Selector, *, together: bool = False) -> list[dict[str, Any]]:
    """Return soft constraints that spread a Deployment's pods over nodes and zones, per revision.

    ``together``: over zones only, because the pods are better off on one node.
    """
    return [
        {
            "maxSkew": 1,
            "topologyKey": key,
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(selector["matchLabels"])},
            "matchLabelKeys": ["pod-template-hash"],
        }
        for key in ([ZONE] if together else [HOSTNAME, ZONE])
    ]


def _expression(label: NodeLabel) -> dict[str, Any]:
    key, value = label
    return {"key": key, "operator": "Exists"} if value is None else {"key": key, "operator": "In", "values": [value]}
