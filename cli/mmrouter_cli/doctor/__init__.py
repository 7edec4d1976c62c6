"""`mmrouter doctor`: everything that one would look at by hand, each finding with what to do about it.

``collect`` reads, the checks judge what was read and read nothing themselves, ``show`` prints.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from mmrouter_cli.doctor import capacity, cluster, pods, resource, routing
from mmrouter_cli.doctor.facts import ClusterFacts, DeploymentFacts, RoutingFacts
from mmrouter_cli.doctor.finding import Finding
from mmrouter_lib.api import SpecError

__all__ = ["Diagnosis", "Finding", "of_cluster", "of_deployment", "of_routing"]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found of one subject: the cluster, or a deployment."""

    subject: str
    findings: tuple[Finding, ...]

    @property
    def problems(self) -> int:
        """Findings that somebody must do something about."""
        return sum(finding.level == "problem" for finding in self.findings)


def of_cluster(facts: ClusterFacts) -> Diagnosis:
    """Judge what belongs to no deployment."""
    return Diagnosis("cluster", (*cluster.definition_check(facts), *cluster.operator_check(facts)))


def of_deployment(whole: ClusterFacts, facts: DeploymentFacts, frontends: RoutingFacts | None) -> Diagnosis:
    """Judge one deployment. ``frontends``: what its frontends say, ``None`` where it has none yet."""
    findings: list[Finding] = [*resource.spec_check(facts), *resource.condition_check(facts)]
    if not isinstance(facts.dep, SpecError):
        dep = facts.dep
        findings += cluster.api_check(whole, dep)
        findings += resource.reference_check(facts)
        findings += capacity.capacity_check(whole, facts, dep)
        findings += resource.security_check(facts, dep)
        findings += resource.network_check(dep)
    findings += pods.pod_check(facts)
    if not isinstance(facts.dep, SpecError):
        findings += pods.memory_check(facts, facts.dep)
    if frontends is not None:
        findings += _of_frontends(frontends)
    return Diagnosis(f"{facts.resource['metadata']['namespace']}/{facts.name}", tuple(findings))


def of_routing(url: str, facts: RoutingFacts) -> Diagnosis:
    """Judge what frontends say, where nothing else can be looked at."""
    return Diagnosis(url, tuple(_of_frontends(facts)))


def _of_frontends(facts: RoutingFacts) -> Iterable[Finding]:
    yield from routing.frontend_check(facts)
    yield from routing.event_check(facts)
    yield from routing.exactness_check(facts)
