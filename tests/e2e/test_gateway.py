"""Deployments behind a Gateway of the cluster: Istio's control plane and its proxy run in pods beside them."""

import re
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, envoy_program, go_programs
from cluster.access import Access
from cluster.istio import GATEWAY
from cluster.operators import diagnosed
from cluster.resources import get
from doc_commands import from_empty_cluster, on_gateway_page
from e2e.deploying import RESTRICTED, Deployed, process_here, run_pod
from e2e.gateway_pods import (
    LISTENING_PORT,
    PROGRAMS,
    Gateway,
    administration,
    apply,
    definitions,
    gateway,
    pilot,
    pod,
    run_proxy,
)
from e2e.images import file, write_derived_image
from e2e.node import Node
from e2e.one_node_cluster import sourced
from e2e.policies import enforced
from e2e.staged_deployments import PRIVILEGED, Chain, chained, encoded
from e2e.test_status_and_doctor import env
from e2e.test_tour import run_in_order, start
from scenarios import SCENARIOS, Chat, Scenario, assert_whole, title
from waiting import wait_for

from hack.cluster.go_programs import GATEWAY_DEFINITIONS
from hack.images.base_image import write_image
from mmrouter_cli.local.envoy import PICKER_PORT

__all__ = ["start"]

SECONDS = 60
REFUSED = 3
POOLS = {"encode": "encoder", "worker": "worker"}
"""Of the deployment behind a picker of frontends: name -> role."""


@dataclass(frozen=True)
class Istio:
    """A node whose pods run Istio's control plane, which is at ``pilot``, and what runs beside it as a proxy."""

    cluster: Node
    pilot: str
    envoy: Path


@dataclass(frozen=True)
class Behind:
    """A deployment behind a Gateway; ``chain.reached`` is there."""

    chain: Chain
    gateway: Gateway

    def status_code(self) -> int:
        """Return the status of a request that needs an engine."""
        body = {"model": self.chain.name, "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
        return self.gateway.post("/v1/chat/completions", body).status_code

    def accepted(self) -> str:
        """Return what the condition says of gateways, once it is True."""

        def message() -> str:
            found = self.chain.condition("GatewayAccepted")
            return str(found["message"]) if found.get("status") == "True" else ""

        return str(self.chain.wait(message, "GatewayAccepted is True"))

    def asked(self) -> int:
        """Return how many requests the gateway has asked the pickers about."""
        total = 0
        for number in range(len(self.chain.reached.controls)):
            with self.chain.reached.control(number) as control:
                total += control.get("/control/state").raise_for_status().json()["gateway_requests"]
        return total


@pytest.fixture(scope="module")
def istio(operated: Access) -> Iterator[Istio]:
    if not isinstance(operated, Node):
        pytest.skip("not run: pods of another cluster cannot mount the gateway's programs from this machine")
    envoy, programs = Path(envoy_program()), go_programs("istio")
    with definitions(operated, programs / "crds"), pilot(operated, programs / "pilot-discovery") as address:
        yield Istio(operated, address, envoy)


def behind(istio: Istio, stack: ExitStack, labels: dict[str, str], frontend: dict[str, Any], **spec: Any) -> Behind:
    """Deploy the example with another frontend and other parts of its spec, behind a Gateway of its own."""
    made = stack.enter_context(gateway(istio.cluster, istio.pilot, istio.envoy))
    namespace = stack.enter_context(istio.cluster.namespace(**labels))
    parent = {"name": GATEWAY, "namespace": made.namespace}
    spec["frontend"] = {**frontend, "gateway": {"parentRefs": [parent]}}
    chain = stack.enter_context(chained(istio.cluster, namespace, spec))
    return Behind(replace(chain, reached=replace(chain.reached, url=made.url)), made)


def apply_from_page(kind: str, chain: Chain, gateway: Gateway) -> None:
    text = on_gateway_page(kind, NAME=chain.name, GATEWAY_NAMESPACE=gateway.namespace)
    done = chain.deployed.cluster.kubectl("apply", "-n", chain.deployed.namespace, "-f", "-", stdin=text)
    assert done.returncode == 0, done.stderr


# -- a picker of engines -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(istio: Istio) -> Iterator[Behind]:
    with ExitStack() as stack:
        made = behind(istio, stack, RESTRICTED, {"mode": "endpointPicker", "replicas": 2})
        apply_from_page("DestinationRule", made.chain, made.gateway)
        made.chain.wait(made.gateway.serves, "the Gateway serves", SECONDS)
        yield made


@pytest.fixture
def chat(engines: Behind) -> Iterator[Chat]:
    with engines.chain.chat() as made:
        yield made


def test_pool_and_route_are_accepted_and_doctor_finds_no_problem(engines: Behind, chat: Chat) -> None:
    name, where = engines.chain.name, f"Gateway {engines.gateway.namespace}/{GATEWAY}"
    message = engines.accepted()
    for words in (f"{where} accepts InferencePool {name}", f"{where} accepts HTTPRoute {name}", "picker"):
        assert words in message
    deployed = engines.chain.deployed
    pool = get(deployed.cluster, "InferencePool", deployed.namespace, name)
    states = {each["type"]: each["status"] for each in pool["status"]["parents"][0]["conditions"]}
    assert states == {"Accepted": "True", "ResolvedRefs": "True"}
    chat.send()
    report = diagnosed(deployed.cluster, name, "-n", deployed.namespace, env=env(deployed.cluster))
    assert report.problems == []
    assert sum("serves gateways by TLS" in each for each in report.seen("gateway", "ok")) == 2


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario_through_the_gateway(scenario: Scenario, engines: Behind, chat: Chat) -> None:
    before = engines.asked()
    scenario(chat, engines.chain.web)
    assert engines.asked() > before


def test_verify_proves_exact_routing_at_the_gateways_address(engines: Behind) -> None:
    done = engines.chain.reached.mmrouter("verify")
    assert done.returncode == 0, done.stdout + done.stderr


def kill_routers(deployed: Deployed) -> None:
    before = deployed.containers()
    for frontend in deployed.pods("frontend"):
        process_here(frontend, "router").kill()
    wait_for(lambda: restarted(deployed, before), SECONDS, "the pickers are back")


def restarted(deployed: Deployed, before: dict[tuple[str, str], tuple[str, int]]) -> bool:
    """Whether every router is another container than before, and Ready."""
    now = deployed.containers()
    routers = [key for key in before if key[1] == "router"]
    states = [each for pod in deployed.pods("frontend") for each in pod["status"].get("conditions") or []]
    ready = all(each["status"] == "True" for each in states if each["type"] == "Ready")
    return ready and all(now[key][0] != before[key][0] for key in routers)


@pytest.mark.long_form
def test_killed_pickers_are_back_with_an_exact_index(engines: Behind, chat: Chat) -> None:
    image = chat.image("kept")
    first = chat.send(image, "what?")
    kill_routers(engines.chain.deployed)
    wait_for(lambda: engines.status_code() == 200, SECONDS, "the Gateway serves again")
    assert_whole(first, chat.send(image, "what?"))


@pytest.mark.long_form
def test_only_the_network_policy_of_the_page_lets_the_gateway_in(engines: Behind) -> None:
    deployed = engines.chain.deployed
    assert isinstance(deployed.cluster, Node)
    with enforced(deployed.cluster, go_programs("policies") / "netpol"):
        kill_routers(deployed)  # connections that were made before stay
        assert [engines.status_code() // 100 for _ in range(REFUSED)] == [5] * REFUSED
        apply_from_page("NetworkPolicy", engines.chain, engines.gateway)
        wait_for(lambda: engines.status_code() == 200, SECONDS, "the Gateway is let in")


# -- a picker of frontends -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def frontends(istio: Istio) -> Iterator[Behind]:
    parts = {"replicas": 1, "accelerator": {"kind": "cpu"}, "sharedMemory": {"scope": "node"}}
    pools = [{"name": name, "role": role, **parts} for name, role in POOLS.items()]
    with ExitStack() as stack:
        # Plain HTTP/2, for which Istio needs no rule.
        frontend = {"mode": "frontendPicker", "pickerTls": "none", "replicas": 1}
        made = behind(istio, stack, PRIVILEGED, frontend, pools=pools)
        made.chain.wait(made.gateway.serves, "the Gateway serves", SECONDS)
        yield made


@pytest.mark.long_form
def test_conditions_say_that_the_picker_chooses_frontends_and_that_every_stage_is_there(frontends: Behind) -> None:
    message = frontends.accepted()
    assert f"accepts InferencePool {frontends.chain.name}" in message
    assert "frontend of each request" in message
    expected = {"ChainComplete": ("True", "EveryStage"), "ExactRoutingVerified": ("True", "Verified")}
    assert frontends.chain.conditions(*expected) == expected


@pytest.mark.long_form
def test_an_image_is_encoded_once_and_answered_through_the_gateway_by_way_of_a_frontend(frontends: Behind) -> None:
    chain = frontends.chain

    def spent() -> dict[str, float]:
        return {role: sum(encoded(chain.deployed, role).values()) for role in POOLS.values()}

    before, asked = spent(), frontends.asked()
    with chain.chat() as chat:
        image = chat.image("staged")
        assert_whole(chat.send(image, "what?"), chat.send(image, "what?"))
        tokens = chat.decided(image, "what?")["images"][0]["tokens"]
    after = spent()
    assert {role: after[role] - before[role] for role in after} == {"encoder": tokens, "worker": 0}
    assert frontends.asked() == asked + 3


# -- the page's commands from an empty cluster ---------------------------------------------------------------------


@pytest.fixture
def sourced_file(istio: Istio, tmp_path: Path) -> Iterator[Path]:
    """What the shell of a command sources."""
    file = tmp_path / "build" / "cluster.sh"
    with sourced(file, istio.cluster.kubeconfig, [istio.cluster.bin, go_programs("helm")]):
        yield file


def test_ten_commands_lead_from_an_empty_cluster_to_an_answer_whose_routing_is_proved(
    istio: Istio, start: Callable[[str], "subprocess.Popen[str]"], record: Record
) -> None:
    definitions, control_plane, *typed = from_empty_cluster()
    # The fixture has these two: the same releases' definitions, and the control plane without its own proxy.
    for module in GATEWAY_DEFINITIONS:
        name, _, version = module.rpartition("/")[2].partition("@")
        assert f"/{name}/releases/download/{version}/" in definitions
    assert control_plane.startswith("istioctl install ")
    *proved, _, _ = typed
    assert len([definitions, control_plane, *proved]) == 10
    gateway = proved.index("kubectl apply -f examples/gateway/istio.yaml") + 1
    run_in_order(start, proved[:gateway], record)
    try:
        run_proxy(istio.cluster, "default", istio.pilot, istio.envoy)
        *_, answer, explanation = run_in_order(start, proved[gateway:], record).values()
        assert "HTTP/1.1 200 OK" in answer
        assert re.search(r"^parity.*the engine holds all \d+ predicted blocks", explanation, re.MULTILINE), explanation
    finally:
        istio.cluster.kubectl("-n", "default", "delete", "pod,service", f"{GATEWAY}-istio")
        run_in_order(start, typed[-2:], record)


# -- the inference extension's own suite ---------------------------------------------------------------------------


SUITE_NAMESPACE = "inference-conformance-infra"
SUITE_GATEWAYS = ("conformance-primary", "conformance-secondary")
SUITE_SECONDS = 1800
OUTCOME = re.compile(r"^    --- (\w+): TestConformance/(\w+) ", re.MULTILINE)
SUITE_SKIPPED = {
    "GatewayWeightedAcrossTwoInferencePools": "pilot has Envoy ask one picker for both pools of a weighted route",
    "InferencePoolMissingEPPRef": "the definitions of 1.5.0, for which pilot is built, refuse its pool",
}
"""Tests of the suite that pilot cannot pass, whatever the picker -> why."""


def kept() -> list[dict[str, Any]]:
    """Return a pool and a route to it by every Gateway of the suite, which stay while the suite's own come and go.

    Pilot takes a listener's filter for pickers away with the last such route, and may not bring it back with the next.
    """
    metadata = {"name": "kept", "namespace": SUITE_NAMESPACE}
    picker = {"name": "kept", "port": {"number": PICKER_PORT}}
    pool = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "kept"}
    rule = {"matches": [{"path": {"type": "PathPrefix", "value": "/kept"}}], "backendRefs": [pool]}
    labels = {"app": "kept"}
    specs: dict[tuple[str, str], dict[str, Any]] = {
        ("v1", "Service"): {"selector": labels, "ports": [{"port": PICKER_PORT, "appProtocol": "http2"}]},
        ("inference.networking.k8s.io/v1", "InferencePool"): {
            "selector": {"matchLabels": labels},
            "targetPorts": [{"number": LISTENING_PORT}],
            "endpointPickerRef": picker,
        },
        ("gateway.networking.k8s.io/v1", "HTTPRoute"): {
            "parentRefs": [{"name": name} for name in SUITE_GATEWAYS],
            "hostnames": ["secondary.example.com"],  # the only one that both admit
            "rules": [rule],
        },
    }
    return [
        {"apiVersion": api, "kind": kind, "metadata": metadata, "spec": spec} for (api, kind), spec in specs.items()
    ]


@pytest.fixture(scope="module")
def suite(istio: Istio, images: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Load what the suite's pods run under the names that its resources give them; return the suite's program."""
    programs, folder = go_programs("suite"), tmp_path_factory.mktemp("suite")
    names = set(re.findall(r"image: (\S+)", (programs / "base.yaml").read_text()))
    (echo,), (picker,) = ([name for name in names if word in name] for word in ("echo-basic", "lwepp"))
    archive, layer = folder / "image.tar", folder / "image.layer"
    with tarfile.open(layer, "w") as out:
        file(out, "echo", (programs / "echo").read_bytes(), 0o755)
    write_image(archive, layer, echo, {"Entrypoint": ["/echo"]})
    istio.cluster.load(archive)
    (router,) = (image for image in images if image.stem == "mmrouter")
    source = Path(__file__).with_name("suite_picker.py").read_bytes()
    write_derived_image(archive, router, picker, {"suite_picker.py": source}, ["python3", "/suite_picker.py"])
    istio.cluster.load(archive)
    return programs / "suite"


@pytest.mark.long_form
def test_the_extensions_suite_passes_with_the_routers_picker_of_frontends(
    istio: Istio, suite: Path, record: Record
) -> None:
    """The suite tests gateways. Its pods are echo servers, so prompts cannot be looked at."""
    cluster = istio.cluster
    body = {"metadata": {"name": SUITE_NAMESPACE}}
    cluster.request("POST", "/api/v1/namespaces", body).raise_for_status()
    for name in SUITE_GATEWAYS:
        run_proxy(cluster, SUITE_NAMESPACE, istio.pilot, istio.envoy, name)
    for each in kept():
        apply(cluster, SUITE_NAMESPACE, each)
    options = (
        *("-test.v", "-test.timeout=30m", "--gateway-class=istio", "--allow-crds-mismatch"),
        f"--skip-tests={','.join(SUITE_SKIPPED)}",
    )
    with administration(cluster) as namespace:
        made = pod("suite", suite, (f"{PROGRAMS}/{suite.name}", *options), 0, {})
        made["spec"]["restartPolicy"] = "Never"
        del made["spec"]["containers"][0]["readinessProbe"]
        run_pod(cluster, namespace, made)

        def ended() -> bool:
            status = cluster.read(f"/api/v1/namespaces/{namespace}/pods/suite")["status"]
            return status["phase"] in ("Succeeded", "Failed")

        wait_for(ended, SUITE_SECONDS, "the suite has ended", every=1)
        log = cluster.kubectl("-n", namespace, "logs", "suite").stdout
    outcomes = {name: outcome for outcome, name in OUTCOME.findall(log)}
    record("tests of the inference extension's suite", len(outcomes))
    assert len(outcomes) > len(SUITE_SKIPPED), log[-3000:]
    expected = {name: "SKIP" if name in SUITE_SKIPPED else "PASS" for name in outcomes}
    assert outcomes == expected, log[-20000:]
