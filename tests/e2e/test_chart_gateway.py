"""The chart's gateway in real pods: it finds deployments by the API server, and loses no request in a rollout."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from artefacts import Record, go_programs
from chart.helm import CHART, NAMESPACE, RELEASE, Helm
from cluster.access import Access
from e2e.deploying import Deployed
from e2e.node import Node
from e2e.report import dump
from gateway.load import Load
from waiting import wait_for

NAME = "mmrouter-gateway"
ALIAS = "canary"
SECONDS = 60


def upgraded(helm: Helm, cluster: Access, gateway: dict[str, Any]) -> None:
    options = (f"--namespace={NAMESPACE}", "--reuse-values", "--wait", "--timeout=5m")
    done = helm.run("upgrade", RELEASE, CHART, *options, values={"gateway": gateway})
    assert done.returncode == 0, done.stderr + dump(cluster, NAMESPACE)


@pytest.fixture(scope="module")
def url(deployed: Deployed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of the gateway's Service."""
    cluster = deployed.cluster
    if not isinstance(cluster, Node):
        pytest.skip("not run: a release that these tests did not install stays as it is")
    helm = Helm(go_programs("helm") / "helm", tmp_path_factory.mktemp("helm"), cluster.kubeconfig)
    models = {ALIAS: {"to": [{"deployment": deployed.name}]}}
    upgraded(helm, cluster, {"enabled": True, "namespace": deployed.namespace, "models": models})
    spec = cluster.read(f"/api/v1/namespaces/{NAMESPACE}/services/{NAME}")["spec"]
    yield f"http://{spec['clusterIP']}:{spec['ports'][0]['port']}"
    upgraded(helm, cluster, {"enabled": False})


def ask(url: str, model: str) -> httpx.Response:
    body = {"model": model, "max_tokens": 2, "messages": [{"role": "user", "content": "Name a harbour."}]}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, trust_env=False)


def test_deployments_of_the_namespace_are_served_by_their_names_and_aliases(deployed: Deployed, url: str) -> None:
    def listed() -> dict[str, str]:
        models = httpx.get(f"{url}/v1/models", timeout=60, trust_env=False).raise_for_status().json()["data"]
        return {each["id"]: each["exact"] for each in models}

    names = {deployed.name, ALIAS}
    wait_for(lambda: listed() == dict.fromkeys(names, "True"), SECONDS, "both names are listed as exact", known=listed)
    for name in names:
        answer = ask(url, name)
        assert (answer.status_code, answer.headers["x-mmrouter-deployment"]) == (200, deployed.name), answer.text
    refused = ask(url, "another")
    assert refused.status_code == 404
    assert all(name in refused.json()["error"]["message"] for name in names)


def test_a_rolling_restart_of_the_gateways_pods_loses_no_request(deployed: Deployed, url: str, record: Record) -> None:
    def rollout(*command: str) -> None:
        done = deployed.cluster.kubectl("-n", NAMESPACE, "rollout", *command, f"deploy/{NAME}")
        assert done.returncode == 0, done.stderr + dump(deployed.cluster, NAMESPACE)

    load = Load(url)
    with load.asking(4):
        load.more(20)
        rollout("restart")
        rollout("status", "--timeout=5m")
        load.more(20)
    record("requests during a rolling restart of the chart's gateway", dict(load.statuses))
    assert load.statuses.keys() == {200}, load.faults[:5]
