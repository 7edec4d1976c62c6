"""Diagnoses a cluster and its deployments, or the frontends behind a URL: collects facts and runs the checks.

Reads with the user's own rights.
"""

import asyncio
import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from mmrouter_cli.cluster.reader import Object, Reader, attempt, namespace_of, reading
from mmrouter_cli.doctor import check_cluster, check_deployment, check_gateway, check_routing
from mmrouter_cli.doctor.check_capacity import capacity_check
from mmrouter_cli.doctor.check_gateway import LIMIT_KINDS, LimitKind
from mmrouter_cli.doctor.findings import (
    ClusterFacts,
    DeploymentFacts,
    Diagnosis,
    Finding,
    FrontendFacts,
    GatewayFacts,
    RoutingFacts,
)
from mmrouter_cli.doctor.picker_health import PickerHealth, picker_health
from mmrouter_cli.status.control_api import (
    CONTROL_PORT,
    ControlEndpoint,
    Frontend,
    State,
    Unread,
    client,
    fetch,
    open_frontends,
)
from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_lib.api.crd import NAME as CRD
from mmrouter_lib.api.crd import VERSION
from mmrouter_operator.cluster.client import NotFound
from mmrouter_operator.cluster.operator_kinds import KINDS
from mmrouter_operator.model.external_refs import references
from mmrouter_operator.model.kinds import DEPLOYMENT_LABEL, POOL_LABEL, RESOURCE, ROLE_LABEL, Capabilities, Ref
from mmrouter_operator.render.frontend import PICKER_PORT
from mmrouter_operator.status.conditions_from_gateways import gateway_apis


async def on_cluster(
    name: str | None, namespace: str | None, kubeconfig: Path | None, control: str | None, token: str | None
) -> list[Diagnosis]:
    """Diagnose a cluster and one deployment, or all of a namespace.

    Raises ``ClusterError`` where the cluster cannot be read, and ``AbsentError`` for a missing deployment.
    """
    namespace = namespace or namespace_of(kubeconfig)
    async with reading(kubeconfig) as reader:
        cluster = await read_cluster(reader)
        diagnoses = [of_cluster(cluster)]
        if not isinstance(cluster.apis, Unread) and f"{CRD.partition('.')[2]}/{VERSION}" not in cluster.apis:
            return diagnoses
        for resource in await resources(reader, namespace, name):
            facts = await read_deployment(reader, resource, cluster)
            routing = await read_routing(reader, facts, kubeconfig, control, token)
            diagnoses.append(of_deployment(cluster, facts, routing))
    return diagnoses


async def on_url(endpoint: ControlEndpoint) -> list[Diagnosis]:
    frontends = [Frontend(url.removeprefix("http://"), url) for url in endpoint.controls]
    facts = await probe_frontends(frontends, endpoint.token)
    pickers = await probe_pickers(list(_pickers_beside(frontends, facts)))
    facts = facts._replace(pickers=pickers, is_local=endpoint.is_local)
    return [_diagnosis(endpoint.url, {"gateway": check_gateway.picker_check(facts), **_of_frontends(facts)})]


def of_cluster(facts: ClusterFacts) -> Diagnosis:
    checks = {"definition": check_cluster.definition_check(facts), "operator": check_cluster.operator_check(facts)}
    return _diagnosis("cluster", checks)


def of_deployment(cluster: ClusterFacts, facts: DeploymentFacts, frontends: RoutingFacts | None) -> Diagnosis:
    """Check one deployment; ``frontends`` is ``None`` while it has none."""
    checks = {"spec": check_deployment.spec_check(facts), "conditions": check_deployment.condition_check(facts)}
    if not isinstance(dep := facts.dep, SpecError):
        checks["APIs"] = check_cluster.api_check(cluster, dep)
        checks["references"] = check_deployment.reference_check(facts)
        checks["nodes"] = capacity_check(cluster, facts, dep)
        checks["Pod Security"] = check_deployment.security_check(facts, dep)
        checks["NetworkPolicy"] = check_deployment.network_check(dep)
    checks["pods"] = check_deployment.pod_check(facts)
    if not isinstance(dep, SpecError):
        checks["shared memory"] = check_deployment.memory_check(facts, dep)
        checks["gateway"] = check_gateway.gateway_check(facts, dep, frontends)
    checks |= _of_frontends(frontends) if frontends is not None else {}
    return _diagnosis(f"{facts.resource['metadata']['namespace']}/{facts.name}", checks)


def _of_frontends(facts: RoutingFacts) -> dict[str, Iterator[Finding]]:
    checks = {"frontends": check_routing.frontend_check(facts), "events": check_routing.event_check(facts)}
    checks |= {"devices": check_routing.device_check(facts)}
    return {**checks, "exactness": check_routing.exactness_check(facts)}


def _diagnosis(subject: str, checks: Mapping[str, Iterator[Finding]]) -> Diagnosis:
    """Return what checks find, under their names."""
    named = (replace(finding, check=name) for name, findings in checks.items() for finding in findings)
    return Diagnosis(subject, tuple(named))


LEASE_SECONDS = 6.0
"""How long a Lease that looks old is observed: three renewals."""
BETWEEN_SECONDS = 1.5
"""Time between the two queries of a frontend."""

_LEASE = "mmrouter-operator"
_OPERATOR_PODS = "app.kubernetes.io/name=mmrouter-operator"
_RUNNING = "status.phase!=Succeeded,status.phase!=Failed"


class AbsentError(Exception):
    """The deployment does not exist."""


async def read_cluster(reader: Reader) -> ClusterFacts:
    served = await reader.capabilities()
    crd, leases, operators, nodes, pods = await asyncio.gather(
        attempt(_or_none(reader, f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD}")),
        attempt(_leases(reader)),
        attempt(reader.items(KINDS["Pod"].path(), labelSelector=_OPERATOR_PODS)),
        attempt(reader.items("/api/v1/nodes")),
        attempt(reader.items(KINDS["Pod"].path(), fieldSelector=_RUNNING)),
    )
    now = time.time()
    facts = ClusterFacts(now, served.apis, crd, leases, operators=operators, nodes=nodes, pods=pods)
    if isinstance(leases, Unread) or not leases or not check_cluster.looks_stale(leases, now):
        return facts
    return replace(facts, renewed=await _renewed(reader, leases))


async def resources(reader: Reader, namespace: str, name: str | None) -> list[Object]:
    """Return one deployment, or all of a namespace. Raises :class:`AbsentError` and ``ApiError``."""
    if name is None:
        return await reader.items(KINDS[RESOURCE].path(namespace))
    resource = await _or_none(reader, KINDS[RESOURCE].path(namespace, name))
    if resource is None:
        raise AbsentError(f"there is no MMRouterDeployment {name} in namespace {namespace}")
    return [resource]


async def read_deployment(reader: Reader, resource: Object, cluster: ClusterFacts) -> DeploymentFacts:
    namespace, name = resource["metadata"]["namespace"], resource["metadata"]["name"]
    dep = read_spec(resource)
    mine = reader.items(KINDS["Pod"].path(namespace), labelSelector=f"{DEPLOYMENT_LABEL}={name}")
    pods, home = await asyncio.gather(attempt(mine), attempt(reader.read(f"/api/v1/namespaces/{namespace}")))
    named = references(dep) if isinstance(dep, MMRouterDeployment) else ()
    referred = await asyncio.gather(*(attempt(_referred(reader, ref)) for ref, _ in named))
    return DeploymentFacts(
        resource=resource,
        dep=dep,
        namespace=home,
        pods=pods,
        referred=dict(zip(named, referred, strict=True)),
        shared_memory=await _shared_memory(reader, [] if isinstance(pods, Unread) else pods),
        gateway=await _gateway(reader, dep, cluster) if isinstance(dep, MMRouterDeployment) else None,
    )


async def read_routing(
    reader: Reader, facts: DeploymentFacts, kubeconfig: Path | None, control: str | None, token: str | None
) -> RoutingFacts | None:
    """Query a deployment's frontends; ``None`` while there is none. ``control``: the URL of one, instead of all."""
    pods = [] if isinstance(facts.pods, Unread) else [pod for pod in facts.pods if is_frontend(pod)]
    namespace = facts.resource["metadata"]["namespace"]
    if not pods and control is None:
        return None
    secret = token if token is not None else await attempt(control_token(reader, namespace, facts.name))
    if isinstance(secret, Unread):
        silent = Unread(f"its token cannot be read: {secret.why}")
        names = [pod["metadata"]["name"] for pod in pods] or [str(control)]
        return RoutingFacts(tuple(FrontendFacts(name, silent, silent) for name in names), 0.0, "Give it with --token.")
    if control is not None:
        return await probe_frontends([Frontend(control, control.rstrip("/"))], secret)
    forward = f"kubectl port-forward -n {namespace} deployment/{facts.name}-frontend 8001"
    advice = f"In another terminal: {forward}. Then add --control http://127.0.0.1:8001"
    async with open_frontends(pods, kubeconfig) as frontends:
        probed = (await probe_frontends(frontends, secret))._replace(advice=advice)
    if isinstance(facts.dep, SpecError) or not facts.dep.spec.frontend.has_picker:
        return probed
    async with open_frontends(pods, kubeconfig, PICKER_PORT) as frontends:
        return probed._replace(pickers=await probe_pickers(frontends))


async def probe_frontends(frontends: Sequence[Frontend], token: str) -> RoutingFacts:
    """Query each frontend twice, since progress shows in the difference."""
    async with client(token) as http:
        first = await asyncio.gather(*(fetch(http, frontend) for frontend in frontends))
        if not all(isinstance(answer, Unread) for answer in first):
            await asyncio.sleep(BETWEEN_SECONDS)

        async def again(frontend: Frontend, before: State | Unread) -> State | Unread:
            return before if isinstance(before, Unread) else await fetch(http, frontend)

        second = await asyncio.gather(*map(again, frontends, first))
    names = (frontend.name for frontend in frontends)
    return RoutingFacts(tuple(map(FrontendFacts, names, first, second)), BETWEEN_SECONDS)


async def probe_pickers(frontends: Sequence[Frontend]) -> tuple[tuple[str, PickerHealth | Unread], ...]:
    """Ask the pickers at these URLs for their health."""

    async def health(url: str | Unread) -> PickerHealth | Unread:
        if isinstance(url, Unread):
            return url
        place = urlsplit(url)
        return await picker_health(str(place.hostname), place.port or PICKER_PORT)

    healths = await asyncio.gather(*(health(frontend.url) for frontend in frontends))
    return tuple(zip((frontend.name for frontend in frontends), healths, strict=True))


def _pickers_beside(frontends: Sequence[Frontend], facts: RoutingFacts) -> Iterator[Frontend]:
    """Yield the pickers of frontends whose own address is known: a forwarded control port is not beside one."""
    for frontend, heard in zip(frontends, facts.frontends, strict=True):
        place = urlsplit(str(frontend.url))
        if isinstance(heard.second, Unread) or "gateway_requests" not in heard.second:
            continue
        if place.port == CONTROL_PORT and place.hostname not in ("127.0.0.1", "::1", "localhost"):
            yield Frontend(frontend.name, f"http://{place.netloc.removesuffix(str(CONTROL_PORT))}{PICKER_PORT}")


async def control_token(reader: Reader, namespace: str, name: str) -> str:
    """Return the token of a deployment's control API. Raises ``ApiError``."""
    secret = await reader.read(KINDS["Secret"].path(namespace, f"{name}-secrets"))
    try:
        return base64.b64decode(secret["data"]["control.token"]).decode()
    except (KeyError, ValueError) as error:
        raise NotFound(f"Secret {name}-secrets has no usable control.token") from error


def is_frontend(pod: Object) -> bool:
    """Whether a pod is a frontend that is not being deleted."""
    return pod["metadata"]["labels"].get(ROLE_LABEL) == "frontend" and "deletionTimestamp" not in pod["metadata"]


def read_spec(resource: Object) -> MMRouterDeployment | SpecError:
    try:
        return parse_deployment({key: value for key, value in resource.items() if key != "status"})
    except SpecError as error:
        return error


async def _leases(reader: Reader) -> list[Object]:
    return await reader.items(KINDS["Lease"].path(), fieldSelector=f"metadata.name={_LEASE}")


async def _renewed(reader: Reader, leases: Sequence[Object]) -> bool:
    before = [lease["metadata"]["resourceVersion"] for lease in leases]
    deadline = time.monotonic() + LEASE_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(0.5)
        if any(lease["metadata"]["resourceVersion"] not in before for lease in await _leases(reader)):
            return True
    return False


async def _gateway(reader: Reader, dep: MMRouterDeployment, cluster: ClusterFacts) -> GatewayFacts | None:
    """Read what lies between gateways and a deployment; ``None`` for one that is not behind a gateway."""
    gateway, namespace = dep.spec.frontend.gateway, dep.metadata.namespace
    if not (apis := gateway_apis(dep)):
        return None
    served = Capabilities(frozenset() if isinstance(cluster.apis, Unread) else cluster.apis)
    objects: Sequence[Object] | Unread | None = None
    if all(served.serves(api) for api in apis):
        answers = await asyncio.gather(
            *(
                attempt(_or_none(reader, KINDS[kind].path(namespace, dep.metadata.name)))
                for kind in ("InferencePool", "HTTPRoute")
                if KINDS[kind].api in apis
            )
        )
        failed = next((answer for answer in answers if isinstance(answer, Unread)), None)
        objects = failed or [answer for answer in answers if isinstance(answer, dict)]
    # Policies are where their target is: the route, or a Gateway of another namespace.
    homes = {namespace, *(ref.namespace or namespace for ref in (gateway.parent_refs if gateway is not None else ()))}
    kinds = [kind for kind in LIMIT_KINDS if served.serves(kind.api)]
    policies, *limits = await asyncio.gather(
        attempt(reader.items(KINDS["NetworkPolicy"].path(namespace))),
        *(attempt(_limit_policies(reader, kind, sorted(homes))) for kind in kinds),
    )
    return GatewayFacts(objects, policies, dict(zip(kinds, limits, strict=True)))


async def _limit_policies(reader: Reader, kind: LimitKind, namespaces: Sequence[str]) -> list[Object]:
    try:
        paths = [f"/apis/{kind.api}/namespaces/{namespace}/{kind.plural}" for namespace in namespaces]
        return [policy for path in paths for policy in await reader.items(path)]
    except NotFound:  # a release of that gateway without this kind
        return []


async def _shared_memory(reader: Reader, pods: Sequence[Object]) -> dict[str, tuple[int, int]] | Unread:
    """Return used bytes and size of the engines' /dev/shm, from the kubelets of their nodes."""
    engines = {
        pod["metadata"]["uid"]: pod["metadata"]["name"]
        for pod in pods
        if pod["metadata"]["labels"].get(POOL_LABEL) and (pod.get("status") or {}).get("phase") == "Running"
    }
    nodes = sorted({pod["spec"]["nodeName"] for pod in pods if pod["metadata"]["uid"] in engines})
    summaries = (f"/api/v1/nodes/{node}/proxy/stats/summary" for node in nodes)
    answers = await asyncio.gather(*(attempt(reader.read(path)) for path in summaries))
    usage = {}
    for answer in answers:
        if isinstance(answer, Unread):
            return answer
        for pod in answer.get("pods") or []:
            name = engines.get((pod.get("podRef") or {}).get("uid", ""))
            for volume in pod.get("volume") or []:
                if name is not None and volume.get("name") == "shm":
                    usage[name] = (int(volume.get("usedBytes", 0)), int(volume.get("capacityBytes", 0)))
    return usage


async def _referred(reader: Reader, ref: Ref) -> Object | None:
    if ref.kind == "PersistentVolumeClaim":
        return await _or_none(reader, KINDS[ref.kind].path(ref.namespace, ref.name))
    # Existence is enough: the content of a Secret is not read.
    return {} if await reader.exists(ref) else None


async def _or_none(reader: Reader, path: str) -> Object | None:
    try:
        return await reader.read(path)
    except NotFound:
        return None
