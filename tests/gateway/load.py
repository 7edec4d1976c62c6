"""Clients of a gateway that ask without a pause, and what became of their requests."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
from waiting import in_threads, wait_for

CLIENTS = 8
SECONDS = 180.0  # ends a hang
PAUSE_SECONDS = 0.05
SLOW_SECONDS = 0.2


class Load:
    """Clients that send one chat after the other on kept connections. ``statuses``: 0 is a broken connection;
    ``faults``: the answers without status 200.
    """

    def __init__(self, url: str) -> None:
        self.statuses: Counter[int] = Counter()
        self.faults: list[str] = []
        self._pause = 0.0
        self._url, self._stop = f"{url}/v1/chat/completions", threading.Event()

    @contextmanager
    def asking(self, clients: int = CLIENTS) -> Iterator[None]:
        with in_threads(self._run, clients, self._stop, 310):
            yield

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """Have each client pause after an answer until the block ends, in which processes start that need the CPUs."""
        self._pause = SLOW_SECONDS
        try:
            yield
        finally:
            self._pause = 0.0

    def more(self, count: int) -> None:
        """Wait for so many more answers with status 200."""
        goal = self.statuses[200] + count
        wait_for(lambda: self.statuses[200] >= goal, SECONDS, f"{count} more answers")

    def answered_without_a_loss(self, count: int) -> None:
        """Wait until so many answers in a row have status 200, those of requests under way included."""
        begin = self.statuses.copy()

        def in_a_row() -> bool:
            nonlocal begin
            since = self.statuses.copy() - begin
            if since.keys() - {200}:
                begin = self.statuses.copy()
            return since.total() == since[200] >= count

        wait_for(in_a_row, SECONDS, f"{count} answers without a loss between them")

    def _run(self, number: int) -> None:
        body = {"model": "demo", "max_tokens": 4, "messages": [{"role": "user", "content": f"Client {number}"}]}
        with httpx.Client(timeout=300) as client:
            while not self._stop.is_set():
                try:
                    answer = client.post(self._url, json=body)
                    self.statuses[answer.status_code] += 1
                    if answer.status_code != 200:
                        self.faults.append(answer.text)
                except httpx.HTTPError as error:
                    self.statuses[0] += 1
                    self.faults.append(repr(error))
                    self._stop.wait(PAUSE_SECONDS)  # a refused connection takes no time
                self._stop.wait(self._pause)
