"""What must not work does not, is said, and is counted: wrong images, wrong keys, and a pod that has no business here.

NetworkPolicies are on, of the chart and of the deployment, and enforced on a node of our own; on another cluster that
depends on its network plugin. They are off where the keys alone have to refuse a foreign pod, which they do on any
cluster.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from artefacts import go_programs
from chart.helm import NAMESPACE as OPERATORS
from cluster.access import Access
from cluster.resources import apply, condition, is_done, status
from e2e.deploying import READY_SECONDS, RESTRICTED, Deployed, deploy, example, make_model, run_pod, wait_or_dump
from e2e.endpoints import PORT as WEB
from e2e.endpoints import address, at_service, manifest
from e2e.node import Node
from e2e.policies import connects, enforced, enforces
from e2e.report import LOOK
from waiting import wait_for

KEY = "a-key-of-the-tenant"
INTRUDER = Path(__file__).with_name("intruder.py")
ABSENT = "mmrouter/absent:0.0.0"
NEVER = {"spec": {"containers": [{"name": "engine", "imagePullPolicy": "Never"}]}}
TROUBLE_SECONDS = 90
OPERATOR_LABELS = {"app.kubernetes.io/name": "mmrouter-operator"}
OPERATOR = ",".join(f"{name}={value}" for name, value in OPERATOR_LABELS.items())


def body(**second: Any) -> dict[str, Any]:
    """The deployment, with two pools of one engine each; ``second``: over the second one's fields."""
    made = example()
    (pool,) = made["spec"]["pools"]
    made["spec"]["pools"] = [
        {**pool, "name": "first", "replicas": 1},
        {**pool, "name": "second", "replicas": 1, **second},
    ]
    made["spec"]["frontend"] = {"replicas": 1, "apiKeys": {"secret": {"name": "tenants"}}}
    return made


@pytest.fixture(scope="module")
def policies(cluster: Access) -> Iterator[None]:
    if isinstance(cluster, Node):
        with enforced(cluster, go_programs("policies") / "netpol"):
            yield
    else:
        yield


@pytest.fixture(scope="module")
def guarded(operated: Access, policies: None) -> Iterator[Deployed]:
    with operated.namespace(**RESTRICTED) as namespace:
        make_model(operated, namespace)
        secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenants"}, "stringData": {"tenant": KEY}}
        operated.request("POST", f"/api/v1/namespaces/{namespace}/secrets", secret).raise_for_status()
        yield deploy(operated, namespace, body())


@pytest.fixture
def client(guarded: Deployed) -> Iterator[openai.OpenAI]:
    with at_service(guarded) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60)


def answers(client: openai.OpenAI, name: str) -> bool:
    answer = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": "hello"}], max_tokens=2, temperature=0
    )
    return answer.choices[0].finish_reason in ("length", "stop")


# -- images --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reasons"),
    [
        ({"image": ABSENT}, ("ErrImagePull", "ImagePullBackOff")),
        ({"image": ABSENT, "podTemplate": NEVER}, ("ErrImageNeverPull",)),
    ],
)
def test_an_image_that_is_nowhere_is_named_with_its_pool_while_the_rest_serves_and_the_right_one_recovers(
    guarded: Deployed, client: openai.OpenAI, change: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    cluster, namespace, name = guarded.cluster, guarded.namespace, guarded.name
    apply(cluster, namespace, body(**change))

    def trouble() -> str:
        assert answers(client, name), "requests go on"
        found = condition(cluster, "Degraded", namespace, name)
        return str(found["message"]) if found.get("reason") == "ImagePullFailed" else ""

    try:
        message = wait_for(trouble, TROUBLE_SECONDS, "Degraded says ImagePullFailed", every=0.5)
        (stuck,) = [pod for pod in guarded.pods("worker") if waiting(pod)]
        assert waiting(stuck) in reasons
        for word in (stuck["metadata"]["name"], "engine", ABSENT):
            assert word in message
        counts = {pool["name"]: pool["ready"] for pool in status(cluster, namespace, name)["pools"]}
        assert counts == {"first": 1, "second": 1}, "the engine of the old image stays until there is another"
        ready = condition(cluster, "Ready", namespace, name)["status"]
        assert ready == "False", "old pods are no success of the new spec"
    finally:
        generation = apply(cluster, namespace, body())["metadata"]["generation"]
    done = partial(is_done, cluster, namespace, name, generation)
    wait_or_dump(cluster, namespace, done, READY_SECONDS, "Ready is True")
    assert condition(cluster, "Degraded", namespace, name)["status"] == "False"
    assert answers(client, name)


def waiting(pod: dict[str, Any]) -> str:
    """Return why the engine of a pod does not start, empty where it does."""
    (engine,) = pod["status"].get("containerStatuses") or [{"state": {}}]
    reason: str = engine["state"].get("waiting", {}).get("reason", "")
    return reason if reason.startswith(("Err", "Image")) else ""


# -- keys ----------------------------------------------------------------------------------------------------------


def metrics(deployed: Deployed, pod: dict[str, Any]) -> "Counter[str]":
    """Return the counters of a pod of ours: name and labels -> value."""
    path = f"/api/v1/namespaces/{deployed.namespace}/pods/{pod['metadata']['name']}:9090/proxy/metrics"
    lines = deployed.cluster.request("GET", path).raise_for_status().text.splitlines()
    rows = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return Counter({name: int(float(value)) for name, _, value in rows if "_total" in name})


def test_a_wrong_key_of_a_client_is_a_401_in_openais_shape_that_is_counted(
    guarded: Deployed, client: openai.OpenAI
) -> None:
    (frontend,) = guarded.pods("frontend")
    before = metrics(guarded, frontend)
    for key in ("wrong", f"{KEY}x"):
        with pytest.raises(openai.AuthenticationError) as refused:
            answers(client.with_options(api_key=key), guarded.name)
        assert refused.value.status_code == 401
        assert refused.value.code == "invalid_api_key"
        assert KEY not in str(refused.value)
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key=key).models.list()
    chat = client.with_options(default_headers={"x-mmrouter-control": "wrong"}).chat.completions.with_raw_response
    answer = chat.create(model=guarded.name, messages=[{"role": "user", "content": "hello"}], max_tokens=1)
    assert "x-mmrouter-worker" not in answer.headers, "a key of a client shows nothing of the routing"
    risen = metrics(guarded, frontend) - before
    assert [risen[REQUESTS.format(path)] for path in ("/v1/chat/completions", "/v1/models")] == [2, 2]
    assert risen[CONTROL.format("header")] == 1


# -- a pod on the pod network --------------------------------------------------------------------------------------


SIDECAR = 'mmrouter_sidecar_refusals_total{{reason="{}"}}'
CONTROL = 'mmrouter_control_refusals_total{{reason="{}"}}'
REQUESTS = 'mmrouter_requests_total{{code="401",path="{}"}}'


def counted(deployed: Deployed, engine: dict[str, Any], frontend: dict[str, Any]) -> Counter[str]:
    """Return what is known of refusals now, under names for what was refused."""
    name = engine["metadata"]["name"]
    sidecar, router = metrics(deployed, engine), metrics(deployed, frontend)
    rows = deployed.execute(name, "sidecar", "cat", "/proc/net/snmp").stdout.splitlines()
    names, values = (row.split() for row in rows if row.startswith("Tcp:"))
    logged = deployed.cluster.kubectl("-n", deployed.namespace, "logs", name, "-c", "engine").stdout
    found = {
        "feed: a key of its own": sidecar[SIDECAR.format("key")],
        # Without CURVE whichever side notices first hangs up.
        "feed: no key": sum(sidecar[SIDECAR.format(reason)] for reason in ("protocol", "handshake")),
        # vLLM has no metric of them: its HTTP metrics are taken behind the check of the key.
        "engine": logged.count("401 Un"),
        # Nothing listens there, so only the kernel can count.
        "closed ports": int(values[names.index("OutRsts")]),
        "control: no token": router[CONTROL.format("missing")],
        "control: a wrong token": router[CONTROL.format("wrong")],
        "clients": router[REQUESTS.format("/v1/chat/completions")],
        "models": router[REQUESTS.format("/v1/models")],
    }
    return Counter(found)


@pytest.fixture(scope="module")
def intruder(guarded: Deployed) -> Iterator[Deployed]:
    """Another namespace, with a pod that has Python and ZeroMQ, a frontend's image, and serves on :data:`WEB`."""
    (frontend,) = guarded.pods("frontend")
    pod = manifest(frontend["spec"]["containers"][0]["image"])
    cluster = guarded.cluster
    with cluster.namespace() as namespace:
        run_pod(cluster, namespace, pod)
        yield Deployed(cluster, namespace, pod["metadata"]["name"])


def known(deployed: Deployed, frontend: dict[str, Any]) -> Any:
    """Return a frontend's state of every engine: what an injected event or verdict would change."""
    look = ("python3", "-c", LOOK, "/control/state")
    done = deployed.execute(frontend["metadata"]["name"], "router", *look)
    workers = json.loads(done.stdout)["workers"]
    facts = ("name", "epoch", "seq", "held", "canary", "standing", "draining", "engine_state")
    return sorted(([worker[fact] for fact in facts] for worker in workers), key=str)


def first_engine(deployed: Deployed) -> dict[str, Any]:
    return next(pod for pod in deployed.pods("worker") if pod["metadata"]["labels"]["mmrouter.io/pool"] == "first")


ENGINE_PORTS = (8000, 7557, 7558)
"""Of an engine's pod: its own, and those of the feed."""


def test_policies_let_through_what_a_deployment_needs_and_nothing_else(guarded: Deployed, intruder: Deployed) -> None:
    cluster, namespace = guarded.cluster, guarded.namespace
    (frontend,), engine = guarded.pods("frontend"), first_engine(guarded)
    own = cluster.read(f"/api/v1/namespaces/{intruder.namespace}/pods/{intruder.name}")
    stranger = (address(own), WEB)
    api = (str(cluster.read("/api/v1/namespaces/default/services/kubernetes")["spec"]["clusterIP"]), 443)
    operator = cluster.read(f"/api/v1/namespaces/{OPERATORS}/pods", labelSelector=OPERATOR)["items"][0]
    if not enforces(cluster, intruder, "web", (address(frontend), 8000)):
        assert not isinstance(cluster, Node)
        pytest.skip("not run: the cluster's network plugin enforces no NetworkPolicies")

    to_engine = {(address(engine), port) for port in ENGINE_PORTS}
    served, control = (address(frontend), 8000), (address(frontend), 8001)
    metrics_ports = {(address(pod), 9090) for pod in (engine, frontend, operator)}
    everything = {*to_engine, *metrics_ports, served, control, stranger, api}

    def reaches(pod: Deployed, container: str) -> set[tuple[str, int]]:
        return {target for target, connected in connects(pod, container, everything).items() if connected}

    def named(namespace: str, pod: dict[str, Any]) -> Deployed:
        return Deployed(cluster, namespace, pod["metadata"]["name"])

    assert reaches(intruder, "web") == {*metrics_ports, served, stranger, api}
    assert reaches(named(namespace, frontend), "router") >= {*to_engine, api}
    assert not reaches(named(namespace, frontend), "router") & {stranger, (address(operator), 9090)}
    # A pod reaches its own addresses whatever a policy says.
    assert reaches(named(namespace, engine), "sidecar") <= {*to_engine, (address(engine), 9090)}
    assert reaches(named(OPERATORS, operator), "operator") == {control, api, (address(operator), 9090)}

    label(intruder, OPERATOR_LABELS)
    wait_for(lambda: connects(intruder, "web", [control])[control], 30, "an operator reaches the control port")
    label(intruder, dict.fromkeys(OPERATOR_LABELS))
    wait_for(lambda: not connects(intruder, "web", [control])[control], 30, "it is no operator any more")
    verify = ("mmrouter", "verify", f"http://{guarded.name}", f"--api-key={KEY}")
    done = guarded.execute(frontend["metadata"]["name"], "router", *verify)
    assert done.returncode == 0, done.stdout + done.stderr


def label(pod: Deployed, labels: Mapping[str, str | None]) -> None:
    place = f"/api/v1/namespaces/{pod.namespace}/pods/{pod.name}"
    body = {"metadata": {"labels": labels}}
    pod.cluster.request("PATCH", place, body, "application/merge-patch+json").raise_for_status()


@pytest.fixture
def without_policies(guarded: Deployed, intruder: Deployed) -> Iterator[None]:
    """The deployment without NetworkPolicies, so that a foreign pod reaches what the keys guard."""
    cluster, namespace = guarded.cluster, guarded.namespace
    open_to_all = body()
    open_to_all["spec"]["networkPolicy"] = {"enabled": False}
    apply(cluster, namespace, open_to_all)
    (frontend,), engine = guarded.pods("frontend"), first_engine(guarded)
    targets = [(address(frontend), 8001), *((address(engine), port) for port in ENGINE_PORTS)]
    wait_for(lambda: all(connects(intruder, "web", targets).values()), 60, "no policy is left", every=0.5)
    yield
    apply(cluster, namespace, body())


def test_a_foreign_pod_is_refused_everywhere_changes_nothing_and_every_attempt_is_counted(
    guarded: Deployed, intruder: Deployed, without_policies: None
) -> None:
    (frontend,), engine = guarded.pods("frontend"), first_engine(guarded)
    key = guarded.secret()["sidecar.curve.public"].decode().strip()
    targets = {"engine": address(engine), "frontend": address(frontend), "sidecar_key": key}

    # A pod of an earlier test may still be going.
    names = sorted(pod["metadata"]["name"] for pod in guarded.pods("worker"))
    wait_for(
        lambda: [(row[0], row[5]) for row in known(guarded, frontend)] == [(name, "verified") for name in names],
        60,
        "the frontend has the existing engines and no other",
        every=0.5,
    )
    before, knew = counted(guarded, engine, frontend), known(guarded, frontend)
    done = intruder.execute(intruder.name, "web", "python3", "-c", INTRUDER.read_text(), stdin=json.dumps(targets))
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)

    asked = {what: found for what, found in outcome.items() if isinstance(found, list)}
    assert len(asked) == 16
    assert {what: found for what, found in asked.items() if found[0] != 401} == {}
    spoken = {what: found for what, found in outcome.items() if what not in asked}
    closed = {what for what in spoken if what.startswith("connect")}
    assert {what: spoken[what] for what in closed} == dict.fromkeys(closed, "ConnectionRefusedError")
    assert {what: found for what, found in spoken.items() if what not in closed and found != "refused"} == {}
    assert (len(closed), len(spoken)) == (3, 9)
    assert known(guarded, frontend) == knew

    attempts = {"feed: a key of its own": 3, "feed: no key": 3, "engine": 4, "closed ports": 3}
    attempts |= {"control: no token": 4, "control: a wrong token": 4, "clients": 2, "models": 2}
    # A line of a log and an event of a socket may come after the answer that they are about.
    wait_for(lambda: counted(guarded, engine, frontend) - before >= Counter(attempts), 30, f"counted are {attempts}")
