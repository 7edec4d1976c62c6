"""One thread of the process gives back what its pools do not use: who hands nothing over calls nothing, either."""

import threading
import time
import weakref
from typing import Protocol

PERIOD_SECONDS = 30.0


class Tidied(Protocol):
    """What has something to give back."""

    def tidy(self) -> None:
        """Give back what was not used since the last call."""


class Tidier:
    """Tidies whatever it watches, for as long as anybody else has it."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._watched: weakref.WeakSet[Tidied] = weakref.WeakSet()
        self._thread: threading.Thread | None = None

    def watch(self, one: Tidied) -> None:
        """Tidy ``one``, too."""
        with self._mutex:
            self._watched.add(one)
            if self._thread is None or not self._thread.is_alive():  # the first one, or a child that was forked
                self._thread = threading.Thread(target=self._run, name="mmrouter-transfer-tidier", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_SECONDS)
            self._tidy()

    def _tidy(self) -> None:
        with self._mutex:
            watched = list(self._watched)
        for one in watched:
            one.tidy()


TIDIER = Tidier()
"""The one of this process."""
