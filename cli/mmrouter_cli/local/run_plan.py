"""The typed plan of a local run, read from rendered Kubernetes objects. Pure."""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from mmrouter_cli.local.folders import LocalError
from mmrouter_operator.render import CHILD_KINDS

MEANINGLESS = frozenset(name for name, kind in CHILD_KINDS.items() if not kind.local)
"""Kinds without meaning outside a cluster. Of pods, these are ignored: resources, security context, placement,
lifecycle hooks, readiness gates, and liveness probes (after sleep, a machine would kill all its engines)."""


class Probe(NamedTuple):
    """One probe; times are seconds. Exactly one of ``http_path``, ``tcp`` and ``command`` says what is tried."""

    http_path: str | None
    tcp: bool
    command: tuple[str, ...] | None
    port: int | str
    host: str
    headers: dict[str, str]
    scheme: str
    delay: float
    period: float
    timeout: float
    failures: int
    successes: int


def parse_probe(obj: Mapping[str, Any] | None, where: str) -> Probe | None:
    """Read a probe; ``None`` stays ``None``. Raises :class:`LocalError` for a kind that is not supported."""
    if not obj:
        return None
    http, tcp, execute = obj.get("httpGet"), obj.get("tcpSocket"), obj.get("exec")
    if sum(part is not None for part in (http, tcp, execute)) != 1:
        raise LocalError(f"{where} needs exactly one of httpGet, tcpSocket and exec")
    target = http or tcp or {}
    return Probe(
        http_path=http.get("path", "/") if http is not None else None,
        tcp=tcp is not None,
        command=tuple(execute["command"]) if execute is not None else None,
        port=target.get("port", 0),
        host=target.get("host", ""),
        headers={h["name"]: h["value"] for h in target.get("httpHeaders") or []},
        scheme=target.get("scheme", "HTTP").lower(),
        delay=float(obj.get("initialDelaySeconds", 0)),
        period=float(obj.get("periodSeconds", 10)),
        timeout=float(obj.get("timeoutSeconds", 1)),
        failures=int(obj.get("failureThreshold", 3)),
        successes=int(obj.get("successThreshold", 1)),
    )


class Mount(NamedTuple):
    """One volume at one path of a container."""

    volume: str
    path: str
    sub_path: str = ""


class ContainerPlan(NamedTuple):
    """One container. ``sidecar``: a native one, which starts before the others and never ends."""

    name: str
    command: tuple[str, ...]
    env: tuple[dict[str, Any], ...]
    env_from: tuple[dict[str, Any], ...]
    mounts: tuple[Mount, ...]
    ports: dict[str, int]
    working_dir: str
    startup: Probe | None
    readiness: Probe | None
    sidecar: bool = False


@dataclass(frozen=True, slots=True)
class PodPlan:
    """One pod; ``uid``, ``ip`` and ``node`` are empty until it is placed. ``devices``: those of its engine."""

    name: str
    namespace: str
    labels: dict[str, str]
    annotations: dict[str, str]
    init: tuple[ContainerPlan, ...]
    containers: tuple[ContainerPlan, ...]
    volumes: tuple[dict[str, Any], ...]
    grace_seconds: float
    uid: str = ""
    ip: str = ""
    node: str = ""
    devices: tuple[str, ...] = ()

    @property
    def ports(self) -> set[int]:
        return {port for container in (*self.init, *self.containers) for port in container.ports.values()}

    def port(self, name: str | int) -> int | None:
        """Return a container port by name; a number is itself."""
        if isinstance(name, int):
            return name
        return next((c.ports[name] for c in (*self.init, *self.containers) if name in c.ports), None)


class ServicePort(NamedTuple):
    """One port of a Service; ``target`` is a number or the name of a container port."""

    port: int
    target: int | str
    scheme: str = "http"


class ServicePlan(NamedTuple):
    name: str
    selector: dict[str, str]
    ports: tuple[ServicePort, ...]
    one_backend: bool = False  # every connection leads to the same pod, as all clients have one address


@dataclass(slots=True)
class RunPlan:
    """Everything to run. ConfigMaps and Secrets are name -> key -> bytes."""

    pods: list[PodPlan] = field(default_factory=list)
    services: list[ServicePlan] = field(default_factory=list)
    config_maps: dict[str, dict[str, bytes]] = field(default_factory=dict)
    secrets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    claims: set[str] = field(default_factory=set)  # names of the PersistentVolumeClaims of the run


def make_plan(objects: Iterable[dict[str, Any]]) -> RunPlan:
    """Read rendered objects. Raises :class:`LocalError` for a kind or a container that cannot be run here."""
    plan = RunPlan()
    for obj in objects:
        kind, name = obj.get("kind"), obj["metadata"]["name"]
        match kind:
            case "Deployment":
                plan.pods += _pods(obj)
            case "Service":
                spec = obj["spec"]
                ports = tuple(
                    ServicePort(
                        p["port"],
                        p.get("targetPort", p["port"]),
                        "https" if p.get("appProtocol") == "https" else "http",
                    )
                    for p in spec["ports"]
                )
                one_backend = spec.get("sessionAffinity") == "ClientIP"
                plan.services.append(ServicePlan(name, spec.get("selector") or {}, ports, one_backend))
            case "PersistentVolumeClaim":
                plan.claims.add(name)
            case "ConfigMap":
                plan.config_maps[name] = {key: text.encode() for key, text in (obj.get("data") or {}).items()}
                plan.config_maps[name] |= _decoded(obj.get("binaryData"))
            case "Secret":
                texts = {key: text.encode() for key, text in (obj.get("stringData") or {}).items()}
                plan.secrets[name] = _decoded(obj.get("data")) | texts
            case _ if kind not in MEANINGLESS:
                raise LocalError(f"{kind} {name} cannot be run locally")
    return plan


def _decoded(data: dict[str, str] | None) -> dict[str, bytes]:
    return {key: base64.b64decode(value) for key, value in (data or {}).items()}


def _pods(obj: dict[str, Any]) -> list[PodPlan]:
    name, template = obj["metadata"]["name"], obj["spec"]["template"]
    metadata, spec = template.get("metadata") or {}, template["spec"]
    init = tuple(_container(c, f"{name}/{c['name']}", init=True) for c in spec.get("initContainers") or [])
    containers = tuple(_container(c, f"{name}/{c['name']}") for c in spec["containers"])
    return [
        PodPlan(
            name=f"{name}-{number}",
            namespace=obj["metadata"].get("namespace", "default"),
            labels=metadata.get("labels") or {},
            annotations=metadata.get("annotations") or {},
            init=init,
            containers=containers,
            volumes=tuple(spec.get("volumes") or []),
            grace_seconds=float(spec.get("terminationGracePeriodSeconds", 30)),
        )
        for number in range(obj["spec"].get("replicas", 1))
    ]


def _container(obj: dict[str, Any], where: str, *, init: bool = False) -> ContainerPlan:
    if not obj.get("command"):
        raise LocalError(
            f"container {where} has no command: it would run its image's command, and images are not used locally"
        )
    for mount in obj.get("volumeMounts") or []:
        if "subPathExpr" in mount:
            raise LocalError(f"container {where}: subPathExpr is not supported locally; use subPath")
        if not mount["mountPath"].strip("/"):
            raise LocalError(f"container {where}: nothing can be mounted at /")
    return ContainerPlan(
        name=obj["name"],
        command=(*obj["command"], *(obj.get("args") or [])),
        env=tuple(obj.get("env") or []),
        env_from=tuple(obj.get("envFrom") or []),
        mounts=tuple(
            Mount(m["name"], m["mountPath"].rstrip("/"), m.get("subPath", "")) for m in obj.get("volumeMounts") or []
        ),
        ports={p.get("name", str(p["containerPort"])): p["containerPort"] for p in obj.get("ports") or []},
        working_dir=obj.get("workingDir", ""),
        startup=parse_probe(obj.get("startupProbe"), f"{where}: startupProbe"),
        readiness=parse_probe(obj.get("readinessProbe"), f"{where}: readinessProbe"),
        sidecar=init and obj.get("restartPolicy") == "Always",
    )
