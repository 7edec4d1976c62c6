"""Any one process may be killed with -9 under load, and no request that was not streaming fails."""

import threading
import time
from collections import Counter
from contextlib import contextmanager

import httpx
import openai
import pytest
from local.rig import ROOT, running
from waiting import wait_for

from mmrouter_cli.sample_images import data_uri, picture

IMAGES = [data_uri(picture(f"load {n}", 112, 112)) for n in range(4)]


@pytest.fixture(scope="module")
def deployment():
    """A deployment of its own: these tests break it."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        yield deployment


@pytest.fixture
def settled(deployment):
    wait_for(deployment.settled, 30, "every worker is verified on every frontend")
    return deployment


class Load:
    """Four clients that send short requests one after the other until told to stop."""

    def __init__(self, deployment) -> None:
        self._deployment, self._stop = deployment, threading.Event()
        self.outcomes: Counter[str] = Counter()
        self.broken: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(4)]

    def _run(self, number: int) -> None:
        client = self._deployment.client()
        turn = 0
        while not self._stop.is_set():
            turn += 1
            content = [
                {"type": "text", "text": f"Client {number} asks about the picture in the {turn % 3}. room. " * 4},
                {"type": "image_url", "image_url": {"url": IMAGES[turn % 4]}},
            ]
            began = False
            try:
                stream = client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": content}], max_tokens=3, stream=turn % 2 == 0
                )
                if turn % 2 == 0:
                    for _ in stream:
                        began = True
                self.outcomes["answered"] += 1
            except openai.APIError as error:
                # What had begun to stream cannot be taken back; everything else must have been answered.
                self.outcomes["broke off" if began else "failed"] += 1
                if not began:
                    self.broken.append(f"{type(error).__name__}: {error}")
            except Exception as error:  # the client's transport has many ways to say that a stream broke off
                self.outcomes["broke off" if began else "failed"] += 1
                if not began:
                    self.broken.append(f"{type(error).__name__}: {error}")

    def answered(self, more: int, seconds: float = 20) -> None:
        goal = self.outcomes["answered"] + more
        wait_for(lambda: self.outcomes["answered"] >= goal, seconds, f"{more} more answers")


@contextmanager
def load(deployment):
    running = Load(deployment)
    for thread in running._threads:
        thread.start()
    try:
        running.answered(12)
        yield running
    finally:
        running._stop.set()
        for thread in running._threads:
            thread.join(60)
    assert running.outcomes["failed"] == 0, running.broken


def assert_replicas_agree(deployment) -> None:
    """Both indexes hold the same keys for every worker: what the sidecars say they hold."""

    def same() -> bool:
        uids = [worker["uid"] for worker in deployment.state(0)["workers"]]
        views = [{uid: deployment.keys(uid, n) for uid in uids} for n in range(2)]
        return views[0] == views[1]

    wait_for(same, 20, "both frontends hold the same index")


def whole_hit(deployment, messages) -> dict:
    raw = deployment.client().chat.completions.with_raw_response.create(model="demo", messages=messages, max_tokens=2)
    usage = raw.parse().usage
    return {
        "overlap": int(raw.headers["x-mmrouter-overlap-blocks"]),
        "blocks": int(raw.headers["x-mmrouter-prompt-blocks"]),
        "size": int(raw.headers["x-mmrouter-block-size"]),
        "worker": raw.headers["x-mmrouter-worker"],
        "tokens": usage.prompt_tokens,
        "cached": usage.prompt_tokens_details.cached_tokens,
    }


QUESTION = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "A question that stays the same before and after the failure. " * 3},
            {"type": "image_url", "image_url": {"url": IMAGES[0]}},
        ],
    }
]


def test_a_killed_engine_is_a_new_epoch_and_no_request_fails(settled):
    before = {worker["name"]: worker for worker in settled.state()["workers"]}
    victim, process = sorted(settled.processes("vllm").items())[0]
    with load(settled) as running:
        process.kill()
        running.answered(20)
        wait_for(settled.settled, 30, "the engine is back and verified anew")
        running.answered(10)
    after = {worker["name"]: worker for worker in settled.state()["workers"]}
    assert after[victim]["epoch"] > before[victim]["epoch"]
    assert after[victim]["id"] != before[victim]["id"]
    assert all(after[name]["epoch"] == before[name]["epoch"] for name in after if name != victim)
    assert_replicas_agree(settled)


def test_a_killed_sidecar_continues_its_epoch_from_journal_and_replay(settled):
    whole_hit(settled, QUESTION)
    before = {worker["name"]: worker for worker in settled.state()["workers"]}
    victim, process = sorted(settled.processes("sidecar").items())[0]
    with load(settled) as running:
        process.kill()
        running.answered(20)
        wait_for(settled.settled, 20, "the sidecar is back")
        running.answered(10)
    after = {worker["name"]: worker for worker in settled.state()["workers"]}
    assert (after[victim]["epoch"], after[victim]["id"]) == (before[victim]["epoch"], before[victim]["id"])
    assert_replicas_agree(settled)
    idle = lambda: not any(worker["waiting"] for n in range(2) for worker in settled.state(n)["workers"])  # noqa: E731
    wait_for(idle, 20, "the engines' queues are seen to be empty")
    again = whole_hit(settled, QUESTION)
    assert again["overlap"] == again["blocks"]
    assert again["cached"] == (again["tokens"] - 1) // again["size"] * again["size"]


def test_a_killed_frontend_costs_no_request_and_its_successor_is_exact_within_two_seconds(settled):
    whole_hit(settled, QUESTION)
    process = sorted(settled.processes("router").items())[0][1]
    number = next(
        n for n, frontend in enumerate(settled.run["frontends"]) if frontend["name"] == process.environ()["POD_NAME"]
    )
    other = 1 - number
    with load(settled) as running:
        process.kill()
        running.answered(20)
        listening = wait_for(lambda: _answers(settled, number) and time.monotonic(), 20, "the frontend listens again")
        wait_for(lambda: _verified(settled, number), 5, "its workers are verified")
        exact = time.monotonic() - listening
        running.answered(10)
    assert exact < 2
    uids = [worker["uid"] for worker in settled.state(other)["workers"]]
    wait_for(
        lambda: all(settled.keys(u, number)["keys"] == settled.keys(u, other)["keys"] for u in uids), 20, "equal index"
    )


def _answers(deployment, number) -> bool:
    try:
        return bool(deployment.state(number)["ready"])
    except (httpx.TransportError, ValueError, KeyError):  # not listening yet
        return False


def _verified(deployment, number) -> bool:
    workers = deployment.state(number)["workers"]
    return len(workers) == 3 and all(worker["standing"] == "verified" for worker in workers)


def test_a_client_that_leaves_aborts_the_request_in_the_engine(settled):
    client = settled.client(max_retries=0)
    stream = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": "Tell a very long story about the sea, please, and do not stop. " * 3}],
        max_tokens=12_000,  # 24 seconds of them
        stream=True,
        extra_body={"ignore_eos": True},
    )
    events = iter(stream)  # kept: dropping it would close the stream
    next(events)
    busy = lambda: sum(worker["in_flight"] for n in range(2) for worker in settled.state(n)["workers"])  # noqa: E731
    wait_for(lambda: busy() == 1, 10, "the request is in flight")
    stream.close()
    wait_for(lambda: busy() == 0, 10, "the request has ended in the router, and not by its last token")
