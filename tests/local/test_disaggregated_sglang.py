"""SGLang's prefill and decode engines as local processes: exact through pairs, and no request fails with an engine."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from local.rig import Deployment
from local.staged_deployments import decided, started
from local.test_scenarios import Folder, web
from scenarios import SCENARIOS, Chat, Scenario, open_chat, title
from waiting import wait_for

__all__ = ["web"]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The example."""
    with started("demo-disaggregated-sglang.yaml", tmp_path_factory.mktemp("pairs")) as deployment:
        yield deployment


def proved(deployment: Deployment) -> bool:
    """Every engine is verified by its half of a pair."""
    standings = {(worker["role"], worker["standing"]) for worker in deployment.state()["workers"]}
    return standings == {("prefill", "verified"), ("decode", "verified")}


@pytest.fixture
def settled(pairs: Deployment) -> Deployment:
    wait_for(lambda: proved(pairs), 60, "every engine is verified")
    return pairs


@pytest.fixture
def chat(settled: Deployment) -> Iterator[Chat]:
    with open_chat(settled) as chat:
        yield chat


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_the_gate_passes_through_pairs(settled: Deployment) -> None:
    done = settled.mmrouter("verify", settled.url)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_decision_names_both_engines_and_explain_shows_them(settled: Deployment, chat: Chat) -> None:
    decision = decided(settled, chat, chat.image("a"), "what?")
    roles = {worker["name"]: worker["role"] for worker in settled.state()["workers"]}
    assert (roles[decision["worker"]], roles[decision["answers"]]) == ("prefill", "decode")
    assert decision["form"] == "prefill-decode"
    assert [(note["stage"], note["outcome"]) for note in decision["chain"]] == [
        ("prefill", "done"),
        ("answer", "first_byte"),
    ]
    shown = settled.mmrouter("explain", settled.url, decision["request_id"]).stdout
    assert "stages, of the form prefill-decode" in shown


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_killed_costs_no_request(settled: Deployment, chat: Chat, role: str) -> None:
    names = {worker["name"] for worker in settled.state()["workers"] if worker["role"] == role}
    running_ = {name: one for name, one in settled.processes("sglang").items() if name in names}
    name, process = sorted(running_.items())[0]
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(decided, settled, chat, chat.image(os.urandom(4).hex()), "what?") for _ in range(48)]
        wait_for(lambda: sum(one.done() for one in sent) >= 8, 30, "the first answers")
        process.send_signal(signal.SIGKILL)
        decisions = [one.result(60) for one in sent]
    others = {decision["worker" if role == "prefill" else "answers"] for decision in decisions} - {name}
    assert others == names - {name}
    outcomes = [[attempt["outcome"] for attempt in decision["attempts"]] for decision in decisions]
    # Which half of a pair notices the death first decides how a failed attempt is named.
    assert {each[-1] for each in outcomes} == {"answered 200"}
    assert not any("answered 200" in each[:-1] for each in outcomes)
    wait_for(lambda: proved(settled), 60, "it is back")
