"""A frontend that is replaced, as a rollout does it: taken off the Service, asked to end, started anew."""

import json
import signal
import threading
from collections import Counter
from contextlib import contextmanager

import httpx
import pytest
from local.rig import ROOT, running
from local.test_failures import assert_replicas_agree
from waiting import wait_for

QUESTION = [{"role": "user", "content": "A question whose blocks both frontends know before and after. " * 8}]


@pytest.fixture(scope="module")
def settled():
    """A deployment of its own, settled: its frontends are restarted."""
    with running(ROOT / "examples" / "demo.yaml") as deployment:
        wait_for(deployment.settled, 30, "every worker is verified on every frontend")
        yield deployment


class Clients:
    """Clients that keep their connections, as most do. A new connection goes to a frontend of the Service; a kept one
    stays where it is until an answer says ``connection: close``.
    """

    def __init__(self, service: list[str], count: int = 4) -> None:
        self.service = service
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(count)]

    def _run(self, number: int) -> None:
        while not self._stop.is_set():
            url = self.service[number % len(self.service)]
            number += 1
            with httpx.Client(base_url=url, timeout=30) as client:
                while not self._stop.is_set():
                    messages = [{"role": "user", "content": f"Client {number} asks about the sea again. " * 6}]
                    body = {"model": "demo", "messages": messages, "max_tokens": 3, "stream": number % 2 == 0}
                    try:
                        answer = client.post("/v1/chat/completions", json=body)
                    except httpx.HTTPError as error:
                        self.failed.append(f"{url}: {error!r}")
                        break
                    if answer.status_code != 200:
                        self.failed.append(f"{url}: {answer.status_code} {answer.text[:200]}")
                    self.answered[url] += 1
                    if answer.headers.get("connection") == "close":
                        break

    def more(self, count: int, url: str = "") -> None:
        """Wait for so many more answers, of one frontend or of any."""
        total = lambda: self.answered[url] if url else self.answered.total()  # noqa: E731
        goal = total() + count
        wait_for(lambda: total() >= goal or self.failed, 30, f"{count} more answers {url}")

    @contextmanager
    def asking(self):
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)


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


def ready(ip: str) -> bool:
    try:
        return httpx.get(f"http://{ip}:9090/readyz", timeout=2).status_code == 200
    except httpx.TransportError:
        return False


def refuses(url: str) -> bool:
    """Whether a new connection is refused."""
    try:
        httpx.get(f"{url}/health", timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
    return False


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
    clients = Clients([mine["url"], other["url"]])
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
    assert clients.failed == []
    wait_for(settled.settled, 20, "every worker is verified on every frontend")
    assert_replicas_agree(settled)
    assert share_held(settled, mine["url"]) == 1.0


def test_an_operator_that_listens_does_not_keep_a_frontend_from_ending(settled):
    mine = settled.run["frontends"][0]
    process = settled.processes("router")[mine["name"]]
    said = []
    with settled.control() as client, client.stream("GET", "/control/stream", timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith("data: "))
        said.append(json.loads(next(lines)[6:]))
        process.send_signal(signal.SIGTERM)
        said += [json.loads(line[6:]) for line in lines]
    process.wait(60)  # an answer may take minutes to drain
    assert [report["ready"] for report in said][:: len(said) - 1] == [True, False]
    wait_for(settled.settled, 30, "it is back")
