"""Any one process may be killed with -9 under load, and no request fails, but for the streams of a killed frontend.

A frontend that is replaced as a rollout does it (taken off the Service, terminated, started anew) loses none at all.
"""

import json
import signal
import threading
import time

import httpx
import pytest
from local.load import KeptConnections, assert_replicas_agree, load, ready, refuses
from waiting import wait_for


@pytest.fixture(scope="module")
def demo(breakable):
    return breakable


def struck(deployment, command):
    """Kill one process of a command under load; return its pod's worker and the others', before and after."""
    before = {worker["name"]: worker for worker in deployment.state()["workers"]}
    victim, process = sorted(deployment.processes(command).items())[0]
    with load(deployment, breaks=False) as running:
        process.kill()
        running.more(20)
        started = wait_for(lambda: replaced(deployment, command, victim, process), 30, "it has been started again")
        wait_for(lambda: heard_since(deployment, started), 30, "it is back, and its engine verified")
        running.more(10)
    after = {worker["name"]: worker for worker in deployment.state()["workers"]}
    return before.pop(victim), after.pop(victim), before, after


def replaced(deployment, command, pod, process):
    """Return the time at which another process runs in a pod, ``None`` where none does."""
    now = deployment.processes(command).get(pod)
    return time.monotonic() if now is not None and now.pid != process.pid else None


def heard_since(deployment, started) -> bool:
    """Whether all is settled by heartbeats that came since; those before are of the killed process."""
    seconds = time.monotonic() - started
    if not deployment.settled():
        return False
    workers = [worker for number in range(2) for worker in deployment.state(number)["workers"]]
    return all(worker["heard_seconds_ago"] < seconds for worker in workers)


def test_a_killed_engine_is_a_new_epoch_and_no_request_fails(settled):
    mine, now, before, after = struck(settled, "vllm")
    assert now["epoch"] > mine["epoch"]
    assert now["id"] != mine["id"]
    assert all(after[name]["epoch"] == before[name]["epoch"] for name in after)
    assert_replicas_agree(settled)


def test_a_killed_sidecar_continues_its_epoch_from_journal_and_replay(settled, chat):
    question = chat.messages(chat.image("a"), "what?")
    chat.send(messages=question)
    mine, now, _, _ = struck(settled, "sidecar")
    assert (now["epoch"], now["id"]) == (mine["epoch"], mine["id"])
    assert_replicas_agree(settled)
    idle = lambda: not any(worker["waiting"] for n in range(2) for worker in settled.state(n)["workers"])  # noqa: E731
    wait_for(idle, 20, "the engines' queues are seen to be empty")
    again = chat.send(messages=question)
    assert again.overlap == again.blocks


def test_a_killed_frontend_costs_no_request_and_its_successor_is_exact(settled, chat, record):
    chat.send(chat.image("a"), "what?")
    process = sorted(settled.processes("router").items())[0][1]
    number = next(
        n for n, frontend in enumerate(settled.run["frontends"]) if frontend["name"] == process.environ()["POD_NAME"]
    )
    other = 1 - number
    with load(settled) as running:
        process.kill()
        running.more(20)
        listening = wait_for(lambda: _answers(settled, number) and time.monotonic(), 20, "the frontend listens again")
        wait_for(lambda: _verified(settled, number), 20, "its workers are verified")
        exact = time.monotonic() - listening
        running.more(10)
    record("a killed frontend's successor is exact after, s", round(exact, 2))
    uids = [worker["uid"] for worker in settled.state(other)["workers"]]
    wait_for(
        lambda: all(settled.keys(u, number)["keys"] == settled.keys(u, other)["keys"] for u in uids), 20, "equal index"
    )


def _answers(deployment, number) -> bool:
    try:
        return bool(deployment.state(number)["ready"])
    except (httpx.HTTPError, ValueError):  # not listening yet
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


QUESTION = [{"role": "user", "content": "A question whose blocks both frontends know before and after. " * 8}]


class Story:
    """One long answer, 7 seconds of it, that is read in the background."""

    def __init__(self, url: str) -> None:
        self.pieces = 0
        self.end = ""
        self._url = url
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        content = "Tell a very long story about the sea, please, and do not stop. " * 3
        messages = [{"role": "user", "content": content}]
        body = {"model": "demo", "messages": messages, "max_tokens": 3600, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    self.pieces += 1
                    self.end = line


def share_held(deployment, url: str) -> float:
    """The share of a question's blocks that a frontend knows to be held."""
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 2}
    headers = {"x-mmrouter-control": deployment.token}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30)
    assert answer.status_code == 200
    return int(answer.headers["x-mmrouter-overlap-blocks"]) / int(answer.headers["x-mmrouter-prompt-blocks"])


def test_a_frontend_is_replaced_under_load_and_no_request_is_lost(settled):
    mine, other = settled.run["frontends"]
    ip = mine["url"].split("//")[1].split(":")[0]
    share_held(settled, other["url"])
    process = settled.processes("router")[mine["name"]]
    clients = KeptConnections([mine["url"], other["url"]])
    with clients.asking():
        clients.more(20, mine["url"])
        # The order of the kubelet: the Service forgets the pod, preStop gives that time to spread, then the signal.
        clients.service.remove(mine["url"])
        clients.more(10)
        story = Story(mine["url"])
        wait_for(lambda: story.pieces > 2, 20, "the story begins")
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: not ready(ip), 10, "it is not Ready any more")
        wait_for(lambda: refuses(mine["url"]), 10, "it takes no new connection")
        assert (process.is_running(), story.end == "data: [DONE]") == (True, False)
        assert share_held(settled, other["url"]) == 1.0
        story.thread.join(60)
        assert story.end == "data: [DONE]"
        process.wait(20)

        wait_for(lambda: ready(ip), 30, "its successor is Ready")
        clients.service.append(mine["url"])
        clients.more(20)
    wait_for(settled.settled, 20, "every worker is verified on every frontend")
    assert_replicas_agree(settled)
    assert share_held(settled, mine["url"]) == 1.0


def test_an_operator_that_listens_does_not_keep_a_frontend_from_ending(settled):
    mine = settled.run["frontends"][0]
    process = settled.processes("router")[mine["name"]]
    reports = []
    with settled.control() as client, client.stream("GET", "/control/stream", timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        reports.append(json.loads(next(lines)[6:]))
        process.send_signal(signal.SIGTERM)
        reports += [json.loads(line[6:]) for line in lines]
    process.wait(60)  # an answer may take minutes to drain
    assert [report["ready"] for report in reports][:: len(reports) - 1] == [True, False]
    wait_for(settled.settled, 30, "it is back")
