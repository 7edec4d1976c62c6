"""SGLang's encoders and the engines that ask them, as local processes: an image keeps to its encoder, which may end."""

import os
import re
import signal
from collections.abc import Iterator, Mapping

import httpx
import pytest
from local.rig import Deployment
from local.staged_deployments import decided, started
from scenarios import Chat, open_chat
from waiting import wait_for

LEARN_SECONDS = 60


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The example."""
    with started("demo-encoders-sglang.yaml", tmp_path_factory.mktemp("beside")) as deployment:
        yield deployment


def proved(deployment: Deployment) -> bool:
    workers = deployment.state()["workers"]
    return {w["standing"] for w in workers if w["role"] == "worker"} == {"verified"}


@pytest.fixture
def settled(beside: Deployment) -> Deployment:
    wait_for(lambda: proved(beside), 60, "every worker is verified: its images were encoded, and are known")
    return beside


@pytest.fixture
def chat(settled: Deployment) -> Iterator[Chat]:
    with open_chat(settled) as chat:
        yield chat


def addresses(deployment: Deployment, role: str) -> dict[str, str]:
    return {worker["name"]: worker["ip"] for worker in deployment.state()["workers"] if worker["role"] == role}


def images(deployment: Deployment, *names: str) -> dict[str, int]:
    """Encoder -> images that it received, for all encoders or for these."""
    found = {}
    for name, ip in addresses(deployment, "encoder").items():
        if not names or name in names:
            text = httpx.get(f"http://{ip}:8000/metrics", timeout=10).raise_for_status().text
            match = re.search(r"^sglang:encoder_cache_total_files_total\{[^}]*\} ([\d.]+)", text, re.MULTILINE)
            assert match is not None
            found[name] = int(float(match[1]))
    return found


def outcomes(deployment: Deployment) -> dict[str, float]:
    """What became of the images that all sidecars passed on."""
    found: dict[str, float] = {}
    for ip in addresses(deployment, "worker").values():
        text = httpx.get(f"http://{ip}:9090/metrics", timeout=10).raise_for_status().text
        for word, number in re.findall(
            r'^mmrouter_sidecar_encodes_total\{outcome="(\w+)"\} ([\d.]+)', text, re.MULTILINE
        ):
            found[word] = found.get(word, 0) + float(number)
    return found


def in_turn(chat: Chat, *content: str) -> str:
    """Send a chat to the engine whose turn it is; return which one it was."""
    raw = chat.client.chat.completions.with_raw_response.create(
        model="demo", messages=chat.messages(*content), max_tokens=4, extra_headers={"x-mmrouter-policy": "roundRobin"}
    )
    return str(raw.headers["x-mmrouter-worker"])


def grown(before: Mapping[str, float], after: Mapping[str, float]) -> set[str]:
    return {name for name in after if after[name] > before.get(name, 0)}


def test_the_same_image_is_encoded_by_the_same_encoder_whichever_engine_asks(settled: Deployment, chat: Chat) -> None:
    used: set[str] = set()
    answered: set[str] = set()
    became = outcomes(settled)
    wanted = set(addresses(settled, "encoder"))
    for number in range(24):  # each image is one encoder's or the other's, as a coin falls
        if number >= 6 and used == wanted:
            break
        one = chat.image(f"kept {number}")
        encoders: set[str] = set()
        for turn in range(3):
            before = images(settled)
            answered.add(in_turn(chat, f"{turn} {os.urandom(4).hex()} is said first", one, "what?"))
            encoders |= grown(before, images(settled))
        assert len(encoders) == 1
        used |= encoders
    assert used == wanted
    assert answered == set(addresses(settled, "worker"))
    assert grown(became, outcomes(settled)) == {"own"}


def test_an_image_is_learned_and_its_repeat_is_a_whole_hit(settled: Deployment, chat: Chat) -> None:
    one = chat.image("learned")

    def known() -> bool:
        return decided(settled, chat, one, "what is to be seen here?")["exactness"] == "exact"

    wait_for(known, LEARN_SECONDS, "the image is known")
    again = decided(settled, chat, one, "what is to be seen here?")
    assert again["identity"]["provider"] == "learned"
    assert (again["exactness"], again["overlap"]) == ("exact", len(again["keys"]))


def test_the_gate_passes_beside_encoders(settled: Deployment) -> None:
    done = settled.mmrouter("verify", "--no-strict", settled.url)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_encoder_that_is_killed_costs_no_request_and_its_images_come_back(settled: Deployment, chat: Chat) -> None:
    one = chat.image("moves")
    before = images(settled)
    decided(settled, chat, one, "where?")
    (owner,) = grown(before, images(settled))
    (other,) = set(addresses(settled, "encoder")) - {owner}
    before, became = images(settled, other), outcomes(settled)
    settled.processes("sglang")[owner].send_signal(signal.SIGKILL)
    for _ in range(4):
        decided(settled, chat, os.urandom(4).hex(), one, "where now?")
    assert grown(before, images(settled, other)) == {other}

    def is_back() -> bool:
        """It answers again, and gets what was its own."""
        try:
            seen = images(settled)
        except httpx.TransportError:
            return False
        decided(settled, chat, os.urandom(4).hex(), one, "where now?")
        return grown(seen, images(settled)) == {owner}

    wait_for(is_back, 60, f"{owner} is back and its image with it")
    # A router may have said that it is gone before the sidecar found out.
    assert grown(became, outcomes(settled)) <= {"own", "moved"}
