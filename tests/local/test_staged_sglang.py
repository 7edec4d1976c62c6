"""SGLang's prefill and decode pairs, and its encoders, as local processes: exact, and no request fails with an engine.

An image keeps to its encoder whichever engine sends it there.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from local.rig import Deployment, metric, samples, staged
from scenarios import SCENARIOS, Chat, Folder, Scenario, completions_repeat_whole, open_chat, title
from waiting import wait_for


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Pairs of prefill and decode engines."""
    with staged("demo-disaggregated-sglang.yaml", tmp_path_factory.mktemp("pairs")) as deployment:
        yield deployment


@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_completions_repeat_whole_through_pairs(chat: Chat) -> None:
    completions_repeat_whole(chat)


def test_the_gate_passes_through_pairs(settled: Deployment) -> None:
    settled.assert_gate_passes()


def test_a_decision_names_both_engines_and_explain_shows_them(settled: Deployment, chat: Chat) -> None:
    decision = chat.decided(chat.image("a"), "what?")
    roles = {worker["name"]: worker["role"] for worker in settled.state()["workers"]}
    assert (roles[decision["worker"]], roles[decision["answers"]]) == ("prefill", "decode")
    assert decision["form"] == "prefill-decode"
    stages = [(note["stage"], note["outcome"]) for note in decision["chain"]]
    assert stages == [("prefill", "done"), ("answer", "first_byte")]
    shown = settled.mmrouter("explain", settled.url, decision["request_id"]).stdout
    assert "stages, of the form prefill-decode" in shown


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_killed_costs_no_request(settled: Deployment, chat: Chat, role: str) -> None:
    names = {worker["name"] for worker in settled.workers(role)}
    name, process = min((name, one) for name, one in settled.processes("sglang").items() if name in names)
    with ThreadPoolExecutor(8) as pool:
        sent = [pool.submit(chat.decided, chat.image(os.urandom(4).hex()), "what?") for _ in range(48)]
        wait_for(lambda: sum(one.done() for one in sent) >= 8, 30, "the first answers")
        process.send_signal(signal.SIGKILL)
        decisions = [one.result(60) for one in sent]
    others = {decision["worker" if role == "prefill" else "answers"] for decision in decisions} - {name}
    assert others == names - {name}
    outcomes = [[attempt["outcome"] for attempt in decision["attempts"]] for decision in decisions]
    # Which half of a pair notices the death first decides how a failed attempt is named.
    assert {each[-1] for each in outcomes} == {"answered 200"}
    assert not any("answered 200" in each[:-1] for each in outcomes)
    wait_for(settled.settled, 60, "it is back")


# -- encoders beside engines --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with staged("demo-encoders-sglang.yaml", tmp_path_factory.mktemp("beside")) as deployment:
        yield deployment


@pytest.fixture
def beside(encoders: Deployment) -> Deployment:
    def proved() -> bool:
        return {worker["standing"] for worker in encoders.workers("worker")} == {"verified"}

    wait_for(proved, 60, "every worker is verified: its images were encoded, and are known")
    return encoders


@pytest.fixture
def shown(beside: Deployment) -> Iterator[Chat]:
    with open_chat(beside) as chat:
        yield chat


def images(deployment: Deployment, *names: str) -> dict[str, float]:
    """Encoder -> images that it received, for all encoders or for these."""
    return {
        each["name"]: metric(each["ip"], "sglang:encoder_cache_total_files_total", 8000)
        for each in deployment.workers("encoder")
        if not names or each["name"] in names
    }


def outcomes(deployment: Deployment) -> Counter[str]:
    """What became of the images that all sidecars passed on."""
    found = Counter[str]()
    for worker in deployment.workers("worker"):
        for sample in samples(worker["ip"], "mmrouter_sidecar_encodes_total"):
            found[sample.labels["outcome"]] += sample.value
    return found


def in_turn(chat: Chat, *content: str) -> str:
    """Send a chat to the engine whose turn it is; return which one it was."""
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(*content), max_tokens=4, extra_headers={"x-mmrouter-policy": "roundRobin"}
    )
    return str(raw.headers["x-mmrouter-worker"])


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> set[str]:
    return {name for name in after if after[name] > before.get(name, 0)}


def test_the_same_image_is_encoded_by_the_same_encoder_whichever_engine_asks(beside: Deployment, shown: Chat) -> None:
    used: set[str] = set()
    answered: set[str] = set()
    became = outcomes(beside)
    wanted = {worker["name"] for worker in beside.workers("encoder")}
    for number in range(24):  # each image is one encoder's or the other's, as a coin falls
        if number >= 6 and used == wanted:
            break
        one = shown.image(f"kept {number}")
        encoders: set[str] = set()
        for turn in range(3):
            before = images(beside)
            answered.add(in_turn(shown, f"{turn} {os.urandom(4).hex()} is said first", one, "what?"))
            encoders |= grown(before, images(beside))
        assert len(encoders) == 1
        used |= encoders
    assert used == wanted
    assert answered == {worker["name"] for worker in beside.workers("worker")}
    assert grown(became, outcomes(beside)) == {"own"}


def test_an_image_is_learned_and_its_repeat_is_a_whole_hit(beside: Deployment, shown: Chat) -> None:
    asked = (shown.image("learned"), "what is to be seen here?")
    wait_for(lambda: shown.decided(*asked)["exactness"] == "exact", 60, "the image is known")
    again = shown.decided(*asked)
    assert again["identity"]["provider"] == "learned"
    assert (again["exactness"], again["overlap"]) == ("exact", len(again["keys"]))


def test_the_gate_passes_beside_encoders(beside: Deployment) -> None:
    beside.assert_gate_passes("--no-strict")


def test_an_encoder_that_is_killed_costs_no_request_and_its_images_come_back(beside: Deployment, shown: Chat) -> None:
    one = shown.image("moves")
    before = images(beside)
    shown.decided(one, "where?")
    (owner,) = grown(before, images(beside))
    (other,) = before.keys() - {owner}
    before, became = images(beside, other), outcomes(beside)
    beside.processes("sglang")[owner].send_signal(signal.SIGKILL)
    for _ in range(4):
        shown.decided(os.urandom(4).hex(), one, "where now?")
    assert grown(before, images(beside, other)) == {other}

    def is_back() -> bool:
        """It answers again, and gets what was its own."""
        try:
            seen = images(beside)
        except httpx.TransportError:
            return False
        shown.decided(os.urandom(4).hex(), one, "where now?")
        return grown(seen, images(beside)) == {owner}

    wait_for(is_back, 60, f"{owner} is back and its image with it")
    # A router may have said that it is gone before the sidecar found out.
    assert grown(became, outcomes(beside)) <= {"own", "moved"}
