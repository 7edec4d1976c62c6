"""Faults of a running deployment raise their alerts in Debian's Prometheus: each after its time, and no other.

The rules are the chart's, with two seconds for a minute. Alerts that need a cluster or hours of traffic are raised by
promtool (``tests/chart/test_alerts.py``).
"""

import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from local.prometheus import PROMETHEUS, Prometheus, prometheus
from local.rig import Deployment, deployed, example
from unit.router.certificates import certificate
from waiting import in_threads, repeating, wait_for

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="not run: no prometheus")

QUEUED = 2
ENGINES = 2
ALERT_SECONDS = 90
"""More than the longest time of a rule at this pace, with the range of its query."""


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the deployment's model, to be changed."""
    source = example()["spec"]["model"]["volume"]["hostPath"]["path"]
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("own") / "model"))


@pytest.fixture(scope="module")
def deployment(own_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One frontend with TLS before two engines of one slot."""
    folder, resource = tmp_path_factory.mktemp("alerts"), example()
    spec, pool = resource["spec"], resource["spec"]["pools"][0]
    spec["model"]["volume"]["hostPath"]["path"] = str(own_model)
    spec["frontend"].update(replicas=1, service={"port": 8443}, tls={"secretName": "tls"})
    spec["routing"]["maxQueuedRequests"] = QUEUED
    pool.update(replicas=ENGINES, args=["--max-num-seqs=1", "--sim-decode-ms=20", "--sim-jitter=0"])
    chain, key = certificate(0)
    data = {"tls.crt": chain.decode(), "tls.key": key.decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "stringData": data}
    with deployed(folder, secret, resource) as running:
        wait_for(running.settled, 60, "both engines are verified")
        yield running


@pytest.fixture(scope="module")
def watching(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with prometheus(deployment, tmp_path_factory.mktemp("prometheus")) as made:
        yield made


def assert_raised_by(watching: Prometheus, alert: str, fault: Callable[[], object]) -> None:
    """A fault raises an alert, which was pending first, in a deployment that has none before; no other alert fires."""
    wait_for(watching.watches, ALERT_SECONDS, "every pod is scraped, every rule evaluated", known=watching.alerts)
    wait_for(lambda: watching.alerts() == [], ALERT_SECONDS, "no alert is left", known=watching.alerts)
    assert watching.value(f'count_over_time(ALERTS{{alertname="{alert}"}}[1h])') == 0
    fault()
    wait_for(lambda: alert in watching.firing(), ALERT_SECONDS, f"{alert} fires", known=watching.alerts)
    assert watching.firing() == {alert}
    assert watching.value(f'count_over_time(ALERTS{{alertname="{alert}",alertstate="pending"}}[1h])') > 0
    (annotations,) = [each["annotations"] for each in watching.alerts() if each["state"] == "firing"]
    assert "default/demo" in annotations["summary"]
    assert annotations["runbook_url"].endswith(f"#{alert.lower()}")


def ask(deployment: Deployment) -> int:
    """Return the status of a short request; 0 where it waits for an answer, as one more request in a queue."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "one more"}], "max_tokens": 1}
    url = f"{deployment.url}/v1/chat/completions"
    try:
        return httpx.post(url, json=body, verify=False, timeout=10).status_code
    except httpx.TimeoutException:
        return 0


@contextmanager
def busy(deployment: Deployment) -> Iterator[None]:
    """Every engine computes a long answer, and its queue is full, until the block ends."""
    body = {"model": "demo", "max_tokens": 20_000, "ignore_eos": True, "stream": True}
    url, stop = f"{deployment.url}/v1/chat/completions", threading.Event()

    def hold(number: int) -> None:
        """Keep a place; at the end one that runs leaves, so that the next one gets its first byte, and leaves."""
        messages = [{"role": "user", "content": f"{number}: tell a very long story about the sea. " * 3}]
        while not stop.wait(0.1):
            with httpx.stream("POST", url, json={**body, "messages": messages}, verify=False, timeout=None) as answer:
                for _ in answer.iter_lines():
                    if stop.is_set():
                        return

    with in_threads(hold, ENGINES * (1 + QUEUED), stop, 300):
        yield


def test_full_queues_raise_queue_full(deployment: Deployment, watching: Prometheus) -> None:
    with ExitStack() as load:

        def fault() -> None:
            load.enter_context(busy(deployment))
            refused = lambda: ask(deployment) == 429  # noqa: E731
            wait_for(refused, ALERT_SECONDS, "a request is refused")
            load.enter_context(repeating(refused, 0.2))

        assert_raised_by(watching, "MMRouterQueueFull", fault)


def test_a_silent_sidecar_raises_feed_stale(deployment: Deployment, watching: Prometheus) -> None:
    sidecar = sorted(deployment.processes("sidecar").items())[0][1]
    try:
        assert_raised_by(watching, "MMRouterFeedStale", lambda: sidecar.send_signal(signal.SIGSTOP))
    finally:
        sidecar.send_signal(signal.SIGCONT)
    wait_for(deployment.settled, 60, "both engines are verified again")


def test_an_unusable_certificate_raises_certificate_stuck(deployment: Deployment, watching: Prometheus) -> None:
    files = list(deployment.folder.rglob("tls.key"))

    def put(key: bytes) -> None:
        for file in files:
            replace(file, key)

    try:
        assert_raised_by(watching, "MMRouterCertificateStuck", lambda: put(certificate(1)[1]))
        assert ask(deployment) == 200, "the earlier one is still in use"
    finally:
        put(certificate(0)[1])


def test_an_engine_with_another_template_raises_exactness_lost(
    deployment: Deployment, watching: Prometheus, own_model: Path
) -> None:
    """The last one: the engine keeps its template."""
    engine = sorted(deployment.processes("vllm").items())[0][1]

    def fault() -> None:
        template = own_model / "chat_template.jinja"
        template.write_text("Hello! " + template.read_text())
        engine.kill()  # the next one reads the template

    assert_raised_by(watching, "MMRouterExactnessLost", fault)


def replace(file: Path, content: bytes) -> None:
    """Replace a file at once, as a kubelet does."""
    fresh = file.with_name(f".{file.name}")
    fresh.write_bytes(content)
    fresh.rename(file)
