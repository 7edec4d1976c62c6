"""Clients that load a deployment while its processes end or are replaced, and what is checked afterwards."""

import threading
from collections import Counter
from contextlib import contextmanager

import httpx
from waiting import answers_ok, wait_for

from mmrouter_cli.sample_images import data_uri, picture

IMAGES = [data_uri(picture(f"load {n}", 112, 112)) for n in range(4)]


class Clients:
    """Clients in threads that send short requests one after the other until the block ends."""

    def __init__(self) -> None:
        self.answered: Counter[str] = Counter()
        self.failed: list[str] = []
        self._stop = threading.Event()

    def more(self, count: int, url: str = "", *, seconds: float = 30) -> None:
        """Wait for so many more answers, of one frontend or of any."""
        total = lambda: self.answered[url] if url else self.answered.total()  # noqa: E731
        goal = total() + count
        wait_for(lambda: total() >= goal or self.failed, seconds, f"{count} more answers {url}")

    @contextmanager
    def asking(self):
        threads = [threading.Thread(target=self._run, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(60)
        assert self.failed == []


class Load(Clients):
    """Clients of the whole deployment. Half of their answers are streams.

    ``breaks``: a frontend ends, and with it the streams that it had begun.
    """

    def __init__(self, deployment, *, breaks: bool = True) -> None:
        super().__init__()
        self._deployment, self._breaks = deployment, breaks

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
                self.answered["any"] += 1
            except Exception as error:  # the client's transport has many ways to say that a stream broke off
                if not (began and self._breaks):
                    self.failed.append(f"{type(error).__name__}: {error}")


@contextmanager
def load(deployment, *, breaks: bool = True):
    with Load(deployment, breaks=breaks).asking() as running:
        running.more(12)
        yield running


def assert_replicas_agree(deployment) -> None:
    """Wait until the indexes of both frontends hold the same keys for every worker."""

    def same() -> bool:
        uids = [worker["uid"] for worker in deployment.state(0)["workers"]]
        views = [{uid: deployment.keys(uid, n) for uid in uids} for n in range(2)]
        return views[0] == views[1]

    wait_for(same, 20, "both frontends hold the same index")


class KeptConnections(Clients):
    """Clients that keep their connections, as most do. A new connection goes to a frontend of the Service; a kept one
    stays where it is until an answer says ``connection: close``.
    """

    def __init__(self, service: list[str]) -> None:
        super().__init__()
        self.service = service

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


def ready(ip: str) -> bool:
    return answers_ok(f"http://{ip}:9090/readyz", 2)


def refuses(url: str) -> bool:
    """Whether a new connection is refused."""
    try:
        httpx.get(f"{url}/health", timeout=2)
    except httpx.ConnectError:
        return True
    except httpx.TransportError:
        return False
    return False
