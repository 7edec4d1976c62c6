"""Diagnoses a cluster: collects, judges, and nothing more."""

from pathlib import Path

from mmrouter_cli import doctor
from mmrouter_cli.cluster_reader import namespace_of, reading
from mmrouter_cli.doctor import Diagnosis, collect
from mmrouter_cli.doctor.cluster import served_version


async def on_cluster(
    name: str | None, namespace: str | None, kubeconfig: Path | None, control: str | None, token: str | None
) -> list[Diagnosis]:
    """Diagnose a cluster and one deployment, or all of a namespace.

    Raises ``ClusterError`` where there is no cluster to read, and ``AbsentError`` where there is no such deployment.
    """
    namespace = namespace or namespace_of(kubeconfig)
    async with reading(kubeconfig) as reader:
        whole = await collect.of_cluster(reader)
        found = [doctor.of_cluster(whole)]
        if not served_version(whole):
            return found
        for resource in await collect.resources(reader, namespace, name):
            facts = await collect.of_deployment(reader, resource)
            routing = await collect.of_routing(reader, facts, kubeconfig, control, token)
            found.append(doctor.of_deployment(whole, facts, routing))
    return found
