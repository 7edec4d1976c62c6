"""Diagnoses a cluster and its deployments, or the frontends behind a URL: collects facts and runs the checks."""

from collections.abc import Iterable
from pathlib import Path

from mmrouter_cli.cluster_reader import namespace_of, reading
from mmrouter_cli.doctor import check_capacity, check_cluster, check_pods, check_resource, check_routing, collect
from mmrouter_cli.doctor.facts import ClusterFacts, DeploymentFacts, RoutingFacts
from mmrouter_cli.doctor.findings import Diagnosis, Finding
from mmrouter_cli.status.control_endpoint import ControlEndpoint
from mmrouter_cli.status.frontend_state import Frontend
from mmrouter_lib.api import SpecError


async def on_cluster(
    name: str | None, namespace: str | None, kubeconfig: Path | None, control: str | None, token: str | None
) -> list[Diagnosis]:
    """Diagnose a cluster and one deployment, or all of a namespace.

    Raises ``ClusterError`` where the cluster cannot be read, and ``AbsentError`` for a missing deployment.
    """
    namespace = namespace or namespace_of(kubeconfig)
    async with reading(kubeconfig) as reader:
        cluster = await collect.of_cluster(reader)
        diagnoses = [of_cluster(cluster)]
        if not check_cluster.served_version(cluster):
            return diagnoses
        for resource in await collect.resources(reader, namespace, name):
            facts = await collect.of_deployment(reader, resource)
            routing = await collect.of_routing(reader, facts, kubeconfig, control, token)
            diagnoses.append(of_deployment(cluster, facts, routing))
    return diagnoses


async def on_url(endpoint: ControlEndpoint) -> list[Diagnosis]:
    """Diagnose what frontends' control APIs show."""
    frontends = [Frontend(url.removeprefix("http://"), url) for url in endpoint.controls]
    facts = await collect.probe_frontends(frontends, endpoint.token)
    return [Diagnosis(endpoint.url, tuple(_of_frontends(facts)))]


def of_cluster(facts: ClusterFacts) -> Diagnosis:
    """Check what belongs to no deployment."""
    return Diagnosis("cluster", (*check_cluster.definition_check(facts), *check_cluster.operator_check(facts)))


def of_deployment(cluster: ClusterFacts, facts: DeploymentFacts, frontends: RoutingFacts | None) -> Diagnosis:
    """Check one deployment; ``frontends`` is ``None`` while it has none."""
    findings: list[Finding] = [*check_resource.spec_check(facts), *check_resource.condition_check(facts)]
    if not isinstance(facts.dep, SpecError):
        findings += check_cluster.api_check(cluster, facts.dep)
        findings += check_resource.reference_check(facts)
        findings += check_capacity.capacity_check(cluster, facts, facts.dep)
        findings += check_resource.security_check(facts, facts.dep)
        findings += check_resource.network_check(facts.dep)
    findings += check_pods.pod_check(facts)
    if not isinstance(facts.dep, SpecError):
        findings += check_pods.memory_check(facts, facts.dep)
    if frontends is not None:
        findings += _of_frontends(frontends)
    return Diagnosis(f"{facts.resource['metadata']['namespace']}/{facts.name}", tuple(findings))


def _of_frontends(facts: RoutingFacts) -> Iterable[Finding]:
    yield from check_routing.frontend_check(facts)
    yield from check_routing.event_check(facts)
    yield from check_routing.exactness_check(facts)
