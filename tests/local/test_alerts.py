"""Faults of a running deployment raise their alerts in Debian's Prometheus: each after its time, and no other.

The rules are the chart's, with two seconds for a minute. MMRouterGateStuck needs an operator: it is raised in
``tests/cluster/test_alerts.py``.
"""

import itertools
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from gateway.gateways import ALIASES, Gateway, gateway_process
from local.engine_certificates import serving_tls, trust
from local.prometheus import ALERT_SECONDS, PROMETHEUS, Prometheus, Target, assert_raised_by, prometheus, targets_of
from local.rig import Deployment, deployed, example
from unit.router.certificates import certificate
from waiting import in_threads, repeating, wait_for

pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="not run: no prometheus")

QUEUED = 2
ENGINES = 2


@pytest.fixture(scope="module")
def own_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the deployment's model, to be changed."""
    source = example()["spec"]["model"]["volume"]["hostPath"]["path"]
    return Path(shutil.copytree(source, tmp_path_factory.mktemp("own") / "model"))


@pytest.fixture(scope="module")
def deployment(own_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One frontend with TLS before two engines of one slot with TLS."""
    folder, (engines, resource) = tmp_path_factory.mktemp("alerts"), serving_tls(example())
    spec, pool = resource["spec"], resource["spec"]["pools"][0]
    spec["model"]["volume"]["hostPath"]["path"] = str(own_model)
    spec["frontend"].update(replicas=1, service={"port": 8443}, tls={"secretName": "tls"})
    spec["routing"]["maxQueuedRequests"] = QUEUED
    pool.update(replicas=ENGINES, args=["--max-num-seqs=1", "--sim-decode-ms=20", "--sim-jitter=0"])
    chain, key = certificate(0)
    data = {"tls.crt": chain.decode(), "tls.key": key.decode()}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tls"}, "stringData": data}
    with ExitStack() as stack:
        # The gateway does not find deployments that other tests run on this machine.
        runs = stack.enter_context(tempfile.TemporaryDirectory(prefix="runs-"))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("XDG_RUNTIME_DIR", runs)
        running = stack.enter_context(deployed(folder, engines, secret, resource))
        wait_for(running.settled, 60, "both engines are verified")
        yield running


@pytest.fixture(scope="module")
def aliases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The gateway's file, to be changed."""
    return Path(shutil.copy(ALIASES, tmp_path_factory.mktemp("gateway")))


@pytest.fixture(scope="module")
def gateway(deployment: Deployment, aliases: Path) -> Iterator[Gateway]:
    with gateway_process("--config", str(aliases)) as made:
        yield made


@pytest.fixture(scope="module")
def watching(
    deployment: Deployment, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    targets = [*targets_of(deployment), Target(f"{gateway.host}:9090", {"namespace": "default", "pod": "gateway"})]
    with prometheus(tmp_path_factory.mktemp("prometheus"), targets) as made:
        yield made


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


def test_a_file_of_aliases_that_cannot_be_read_raises_gateway_stale(watching: Prometheus, aliases: Path) -> None:
    before = aliases.read_bytes()
    try:
        assert_raised_by(watching, "MMRouterGatewayStale", lambda: replace(aliases, b"aliases: ["), "default")
    finally:
        replace(aliases, before)


def test_engines_of_another_ca_raise_engine_certificate_refused(deployment: Deployment, watching: Prometheus) -> None:
    wait_for(watching.watches, ALERT_SECONDS, "every pod is scraped, every rule evaluated")
    refusals = 'mmrouter_engine_tls_total{event=~"untrusted|name|expired"}'
    assert watching.value(f"count({refusals})") == 3, "without a series at 0 the first refusal would be no increase"
    with ExitStack() as load:

        def fault() -> None:
            trust(deployment, 7)
            load.enter_context(repeating(lambda: ask(deployment), 0.2))

        try:
            assert_raised_by(watching, "MMRouterEngineCertificateRefused", fault)
        finally:
            trust(deployment, 0)
    wait_for(deployment.settled, 60, "both engines are verified again")


def test_requests_away_from_their_caches_raise_hit_ratio_below_round_robin(
    deployment: Deployment, watching: Prometheus
) -> None:
    """Each prompt comes twice, by turns: the second time at the engine that did not compute it."""
    headers = {"x-mmrouter-control": deployment.token, "x-mmrouter-policy": "roundRobin"}
    url, numbers = f"{deployment.url}/v1/chat/completions", itertools.count()

    def twice() -> None:
        messages = [{"role": "user", "content": f"{next(numbers)}: Tell of the sea and of its ships. " * 200}]
        body = {"model": "demo", "max_tokens": 1, "messages": messages}
        for _ in range(2):
            assert httpx.post(url, json=body, headers=headers, verify=False, timeout=60).status_code == 200

    with ExitStack() as load:
        fault = lambda: load.enter_context(repeating(twice, 0.2))  # noqa: E731
        assert_raised_by(watching, "MMRouterHitRatioBelowRoundRobin", fault)


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
