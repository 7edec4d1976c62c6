"""Two deployments behind one address (`mmrouter gateway`): what clients see, splits, keys, and restarts under load."""

import json
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml
from doc_commands import many_models
from gateway.gateways import ALIASES, CHAT, SMALL, START_SECONDS, Gateway, gateway_process
from gateway.load import Load
from local.rig import ROOT, Deployment, deployed, example, metric, running
from scenarios import SCENARIOS, Chat, Folder, Scenario, open_chat, title
from services import service
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture
from mmrouter_router.gateway import config
from mmrouter_router.gateway.model_routes import Deployment as Deployed
from mmrouter_router.gateway.model_routes import Routes, of_conversation
from mmrouter_router.gateway.requested_model import conversation


@dataclass
class Site:
    """Two deployments and the gateway in front of them."""

    demo: Deployment
    small: Deployment
    gateway: Gateway

    def settled(self) -> bool:
        return self.demo.settled() and self.small.settled()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    resource = example()  # with one of its three engines
    resource["spec"]["pools"][0]["replicas"] = 1
    with ExitStack() as stack:
        # Deployments that other tests run on this machine at the same time are not of this gateway.
        runs = stack.enter_context(tempfile.TemporaryDirectory(prefix="runs-"))
        stack.enter_context(pytest.MonkeyPatch.context()).setenv("XDG_RUNTIME_DIR", runs)
        demo = stack.enter_context(deployed(tmp_path_factory.mktemp("demo"), resource, start_seconds=START_SECONDS))
        small = stack.enter_context(running(SMALL, start_seconds=START_SECONDS))
        gateway = stack.enter_context(gateway_process("--config", str(ALIASES)))
        made = Site(demo, small, gateway)
        wait_for(made.settled, START_SECONDS, "every worker is verified on every frontend")
        wait_for(lambda: {"demo", "small"} <= set(gateway.names()), 30, "both deployments are found")
        yield made


@pytest.fixture
def gateway(site: Site) -> Gateway:
    return site.gateway


def test_every_name_is_listed_with_its_exactness(site: Site) -> None:
    def listed() -> dict[str, Any]:
        return {model.id: model.model_dump() for model in site.gateway.client().models.list()}

    assert list(listed()) == ["canary", "demo", "gpt-4o", "small"]
    wait_for(lambda: {model["exact"] for model in listed().values()} == {"True"}, 60, "all are proved exact")
    assert [(one["name"], one["weight"]) for one in listed()["canary"]["deployments"]] == [("demo", 95), ("small", 5)]
    assert site.gateway.client().models.retrieve("small").model_dump()["deployments"][0]["model"] == "small"


@pytest.mark.parametrize("scenario", SCENARIOS[:3], ids=title)
def test_scenarios_of_images_pass_through_the_gateway(scenario: Scenario, site: Site, web: Folder) -> None:
    through = replace(site.demo, run={**site.demo.run, "endpoint": site.gateway.url})
    chat: Chat
    with open_chat(through) as chat:
        scenario(chat, web)


def test_the_model_of_a_request_decides_its_deployment_for_chats_streams_and_images(gateway: Gateway) -> None:
    client = gateway.client()
    part = {"type": "image_url", "image_url": {"url": data_uri(picture("many", 56, 56))}}
    content = [{"type": "text", "text": "What is this?"}, part]
    for model in ("demo", "small"):
        messages: Any = [{"role": "user", "content": content}]
        raw = client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=2)
        assert (raw.headers["x-mmrouter-deployment"], raw.parse().model) == (model, model)
        chunks = list(client.chat.completions.create(model=model, messages=messages, max_tokens=4, stream=True))
        assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) >= 2
    body = {"model": "small", "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    assert httpx.post(f"{gateway.url}/v1/messages", json=body, timeout=60).json()["type"] == "message"


def test_an_unknown_model_is_a_404_that_lists_the_served_ones(gateway: Gateway) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        gateway.client().chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "x"}])
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
    assert refused.value.body["message"].endswith("Served: canary, demo, gpt-4o, small.")  # type: ignore[index]


def test_an_alias_is_served_by_its_deployment_under_its_own_name(gateway: Gateway) -> None:
    answer = gateway.ask("gpt-4o", "Tell of the sea.")
    assert (answer.status_code, answer.headers["x-mmrouter-deployment"]) == (200, "demo")
    assert answer.json()["model"] == "demo"


def test_a_split_keeps_each_conversation_where_its_hash_says_as_it_grows(gateway: Gateway) -> None:
    deployments = [Deployed(name, name, "", 0) for name in ("demo", "small")]
    split = Routes(deployments, config.load(ALIASES)).choices("canary")

    def expected(text: str) -> str:
        first = {"messages": [{"role": "user", "content": text}]}
        return of_conversation("canary", split, conversation(first)).deployment.name

    visitors = {text: expected(text) for text in (f"Visitor {number}" for number in range(1000))}
    assert 20 <= Counter(visitors.values())["small"] <= 80  # 5 of 100; the hash is the same in every run
    for name in ("demo", "small"):
        for text in [text for text, found in visitors.items() if found == name][:3]:
            opening = gateway.ask("canary", text)
            grown = gateway.ask("canary", text, "Welcome.", "Thank you.", max_tokens=2, temperature=0)
            for answer in (opening, grown):
                assert (answer.status_code, answer.headers["x-mmrouter-deployment"]) == (200, name), answer.text


def test_a_changed_file_is_used_without_a_restart_and_a_bad_one_is_reported(site: Site, tmp_path: Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text(yaml.safe_dump({"models": {"first": {"to": [{"deployment": "demo"}]}}}))
    with gateway_process("--config", str(file)) as gateway:
        wait_for(lambda: gateway.names() == ["demo", "first", "small"], 30, "the first alias is served")
        file.write_text(yaml.safe_dump({"models": {"second": {"to": [{"deployment": "demo", "weight": "x"}]}}}))
        wait_for(lambda: metric(gateway.host, "mmrouter_gateway_config_refused") == 1, 30, "the bad file is refused")
        assert any("models.second.to[0].weight" in line for line in gateway.log)
        assert gateway.names() == ["demo", "first", "small"]
        file.write_text(yaml.safe_dump({"models": {"second": {"to": [{"deployment": "small"}]}}}))
        wait_for(lambda: gateway.names() == ["demo", "second", "small"], 30, "the second alias is served")
        assert metric(gateway.host, "mmrouter_gateway_config_refused") == 0


def test_a_bad_file_at_the_start_is_a_sentence_and_status_2(tmp_path: Path) -> None:
    file = tmp_path / "aliases.yaml"
    file.write_text("models: {m: {to: []}}")
    command = [sys.executable, "-m", "mmrouter_cli", "gateway", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS, cwd=ROOT)
    assert done.returncode == 2
    assert done.stderr.startswith(f"mmrouter gateway: {file}: models.m.to: ")


KEYS = {"team-a": "key-of-a", "team-b": "key-of-b"}
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": KEYS}


def test_a_deployment_judges_its_tenants_keys_itself(gateway: Gateway, tmp_path: Path) -> None:
    resource = example()
    resource["metadata"]["name"] = "keyed"
    resource["spec"]["frontend"].update(replicas=1, apiKeys={"secret": {"name": "keys"}})
    resource["spec"]["pools"][0]["replicas"] = 1
    with deployed(tmp_path, SECRET, resource, start_seconds=START_SECONDS) as keyed:
        wait_for(lambda: "keyed" in gateway.names(), 30, "the deployment is found")
        refused = gateway.ask("keyed", "Hello", key="wrong")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert {gateway.ask("keyed", "Hello", key=key).status_code for key in KEYS.values()} == {200}
        assert gateway.ask("demo", "Hello", key="wrong").status_code == 200  # it has no keys
        assert keyed.metric("mmrouter_requests_total", path=CHAT, code="200") == 2
    wait_for(lambda: "keyed" not in gateway.names(), 30, "the deployment has left")


# -- restarts under load


def routers(deployment: Deployment) -> dict[str, psutil.Process]:
    return deployment.processes("router")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["a rolling restart", "a crash"])
def test_no_request_is_lost_by_frontends_that_restart_one_by_one(site: Site, number: signal.Signals) -> None:
    def restarted(name: str, pid: int) -> bool:
        now = routers(site.demo).get(name)
        return now is not None and now.pid != pid

    wait_for(site.demo.settled, START_SECONDS, "every worker is verified on every frontend")
    load = Load(site.gateway.url)
    with load.asking():
        load.more(20)
        for name, process in routers(site.demo).items():
            process.send_signal(number)
            with load.slowly():
                wait_for(partial(restarted, name, process.pid), START_SECONDS, "the frontend has restarted")
                wait_for(site.demo.settled, START_SECONDS, "every worker is verified on every frontend")
            load.more(20)
    assert load.statuses.keys() == {200}, load.faults[:5]


def test_no_request_is_lost_by_gateways_that_restart_one_by_one(site: Site) -> None:
    with ExitStack() as stack:
        gateways = [stack.enter_context(gateway_process()) for _ in range(2)]
        wait_for(lambda: all(one.ready for one in gateways), 60, "both gateways are ready")
        load = Load(stack.enter_context(service(lambda: [(one.host, 8080) for one in gateways if one.ready])))
        with load.asking():
            load.more(20)
            for number in range(2):
                old = gateways[number]
                old.process.send_signal(signal.SIGTERM)
                with load.slowly():
                    assert old.process.wait(60) == 0
                    gateways[number] = stack.enter_context(gateway_process())
                    wait_for(lambda number=number: gateways[number].ready, 30, "the new gateway is ready")
                load.more(20)
        assert load.statuses.keys() == {200}, load.faults[:5]


# -- the page


def test_the_commands_of_the_page_succeed_as_they_stand(site: Site) -> None:
    commands = [command for command in many_models() if not command.startswith((".venv/bin/mmrouter up", "make "))]
    (own,) = [command for command in commands if command.startswith(".venv/bin/mmrouter gateway")]
    assert own.split()[2:] == ["--config", str(ALIASES.relative_to(ROOT))]  # what the fixture runs
    shown = {}
    for command in commands:
        if command == own or command.startswith("GATEWAY="):
            continue
        here = command.replace("$GATEWAY", site.gateway.url)
        done = subprocess.run(["bash", "-c", here], cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        shown[command] = done.stdout
    assert len(shown) >= 3
    assert [json.loads(out)["object"] for command, out in shown.items() if "/v1/models" in command] == ["list"]
    assert all("x-mmrouter-deployment:" in out for out in shown.values() if "HTTP/1.1" in out)
