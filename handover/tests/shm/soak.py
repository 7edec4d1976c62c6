"""Hand over payloads between real processes that are killed with SIGKILL at random points, and check each outcome."""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from handover.tests.shm import soak_process as process_module
from handover.tests.shm.soak_process import LEASE_SECONDS, is_cancelled, is_plain

HELD = 3
READ, FELL_BACK = "read", "fell back"
Json = dict[str, Any]


class EndedError(Exception):
    """The process was killed before it answered."""


class PeerProcess:
    """A writer or reader process, with a spare one that is already started, because Python starts slowly."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.root = kind, root
        self.process, self.spare = self.start(), self.start()
        self.lives = 0
        """Number of replacements."""
        self.seconds = 0.002
        """Moving average of the time of an answer."""

    def start(self) -> "subprocess.Popen[str]":
        command = [sys.executable, process_module.__file__, self.kind, str(self.root)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, kill_after: float | None = None, **question: Any) -> Json:
        """Return the answer; the process is killed ``kill_after`` seconds after the question."""
        if self.process.poll() is not None:
            self.replace()
        killer = None
        began = time.monotonic()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            if kill_after is not None:
                killer = threading.Timer(kill_after, self.process.kill)
                killer.start()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if killer is not None:
            killer.join()
            self.process.wait()
            self.replace()
        if not line.endswith("\n"):
            raise EndedError
        self.seconds += (time.monotonic() - began - self.seconds) / 8
        answer: Json = json.loads(line)
        return answer

    def replace(self) -> None:
        _close(self.process)
        self.process, self.spare = self.spare, self.start()
        self.lives += 1

    def end(self) -> None:
        for process in (self.process, self.spare):
            process.kill()
            _close(process)


def _close(process: "subprocess.Popen[str]") -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


class Soak:
    """A writer, a reader, and everything that was handed over between them."""

    def __init__(self, root: Path, seed: str) -> None:
        self.writer, self.reader = PeerProcess("write", root), PeerProcess("read", root)
        self.rnd = random.Random(seed)
        self.outcomes: Counter[str] = Counter()
        self._held: list[int] = []
        self._old: list[tuple[int, Json]] = []

    def run(self, hand_overs: int, kills: int, after_each: Callable[[bool], None]) -> None:
        """Hand over with kills at random points; ``after_each`` gets whether a process was killed."""
        ends = self.writer, self.reader
        chosen = set(self.rnd.sample(range(hand_overs), kills))
        for number in range(hand_overs):
            victim = self.rnd.choice(ends) if number in chosen else None
            after = {victim: self.rnd.uniform(0, 2 * victim.seconds)} if victim is not None else {}
            self.outcomes[self._hand_over(number, after, hold=self.rnd.random() < 0.3)] += 1
            if len(self._held) > HELD:
                self._release_view(self._held.pop(0))
            if self._old and self.rnd.random() < 0.2:
                self._try_again(*self.rnd.choice(self._old))
            after_each(victim is not None)
        assert sum(self.outcomes.values()) == hand_overs

    def end(self) -> None:
        """Kill both processes."""
        self.writer.end()
        self.reader.end()

    def _hand_over(self, number: int, after: dict[PeerProcess, float], *, hold: bool) -> str:
        """Run one request; return whether the hand-over or the re-fetch handle served it.

        A wrong payload, or a refusal without a cause, is an assertion error.
        """
        life, began = self.writer.lives, time.monotonic()  # before any lease begins
        try:
            written = self.writer.ask(after.get(self.writer), number=number)
            if "failed" in written:
                assert written["failed"] == "full"
                return FELL_BACK
            self._old.append((number, written))
            if not is_plain(number):
                assert written["handle"]["refetch"] == str(number)
            answer = self.reader.ask(after.get(self.reader), number=number, hold=hold, **written)
        except EndedError:
            self._finish(number)
            return FELL_BACK
        self._finish(number)
        if "failed" in answer:
            # Cancelled, or its writer is dead and the reader came after the end of the lease.
            late = self.writer.lives != life and time.monotonic() - began > LEASE_SECONDS
            assert is_cancelled(number) or late, (number, answer)
            # A slot that nothing leases is stale until its writer gives it back, then it is gone.
            assert answer["failed"] in (("gone",) if is_plain(number) else ("stale", "gone")), answer
            return FELL_BACK
        assert answer["wrong"] is False
        if hold and not is_plain(number):
            self._held.append(number)
        return READ

    def _finish(self, number: int) -> None:
        """The request has ended: the writer releases its plain file."""
        if is_plain(number):
            try:
                self.writer.ask(done=number)
            except EndedError:
                return

    def _try_again(self, number: int, written: Json) -> None:
        """Read an old hand-over: it is unchanged, or refused."""
        answer = self.reader.ask(number=number, hold=False, **written)
        assert answer.get("wrong") is not True
        assert answer.get("failed", "stale") in ("stale", "gone")

    def _release_view(self, number: int) -> None:
        try:
            assert self.reader.ask(number=number).get("wrong", False) is False
        except EndedError:  # killed while it held the view
            return


@contextmanager
def soak(root: Path, seed: str) -> Iterator[Soak]:
    """Run a soak whose processes are ended with the block."""
    session = Soak(root, seed)
    try:
        yield session
    finally:
        session.end()
