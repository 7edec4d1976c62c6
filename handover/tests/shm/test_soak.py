"""Kill real processes with SIGKILL at random points of a hand-over: no wrong read, no failure, nothing left over.

100 hand-overs with 20 kills; ``make soak`` sets MMROUTER_SOAK=1000, the number of kills, with ten hand-overs each.

This file is also the program of these processes, controlled by lines of JSON. The content of a payload follows from its
number alone, so a reader can verify it without the writer. Every third one travels as a plain file, the others by
leased slots.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from mmrouter_handover.shm import HandOverError, PlainFile, PlainFiles, Pool, Reader, View, ledger, read_handle, reclaim
from mmrouter_handover.shm.files import clock

SOAK = "MMROUTER_SOAK"
KILLS = int(os.environ.get(SOAK, "20"))
HAND_OVERS = 10 * KILLS if SOAK in os.environ else 100
SEED = os.environ.get("MMROUTER_SOAK_SEED", "1")
HELD = 3
READ, FELL_BACK = "read", "fell back"
Json = dict[str, Any]
SIZES = (1000, 65_536, 150_000, 400_000)
LIMIT_BYTES = 3 << 20
"""A few slots, so that each is reused while others are read."""
LEASE_SECONDS = 1.0


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
        command = [sys.executable, __file__, self.kind, str(self.root)]
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

    def close(self) -> None:
        for end in (self.writer, self.reader):
            for process in (end.process, end.spare):
                process.kill()
                _close(process)

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
            return FELL_BACK
        finally:
            if is_plain(number):  # the request has ended: the writer releases its plain file
                with suppress(EndedError):
                    self.writer.ask(done=number)
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

    def _try_again(self, number: int, written: Json) -> None:
        """Read an old hand-over: it is unchanged, or refused."""
        answer = self.reader.ask(number=number, hold=False, **written)
        assert answer.get("wrong") is not True
        assert answer.get("failed", "stale") in ("stale", "gone")

    def _release_view(self, number: int) -> None:
        with suppress(EndedError):  # killed while it held the view
            assert self.reader.ask(number=number).get("wrong", False) is False


def payload(number: int) -> bytes:
    """Return the bytes of a payload; any two payloads differ everywhere."""
    return random.Random(number).randbytes(SIZES[number % len(SIZES)])


def is_plain(number: int) -> bool:
    """Whether a payload travels as a plain file."""
    return number % 3 == 0


def is_cancelled(number: int) -> bool:
    """Whether the request is cancelled before its payload is read."""
    return number % 7 == 0


def write(root: str) -> None:
    """Answer ``{"number"}`` with a handle or a path, or with the reason of a failure; ``{"done"}`` releases it."""
    files: dict[int, PlainFile] = {}
    with Pool(root, "soak", limit_bytes=LIMIT_BYTES) as pool, PlainFiles(root, "soak", LIMIT_BYTES) as plains:

        def answer(question: Json) -> Json:
            if "done" in question:
                if question["done"] in files:
                    files.pop(question["done"]).release()
                return {}
            number = question["number"]
            if is_plain(number):
                files[number] = file = plains.put(payload(number), ".png", seconds=LEASE_SECONDS)
                if is_cancelled(number):
                    files.pop(number).release()
                return {"path": str(file.path)}
            lease = pool.put(payload(number), str(number), seconds=LEASE_SECONDS)
            assert lease.handle is not None
            if is_cancelled(number):
                lease.release()
            return {"handle": lease.handle.to_json()}

        serve(answer)


def read(root: str) -> None:
    """Open, verify, hold and release payloads; ``wrong`` in an answer means that other bytes were read."""
    views: dict[int, View] = {}
    with Reader(root) as reader:

        def answer(question: Json) -> Json:
            number = question["number"]
            if "path" in question:  # as an engine without this library does
                return {"wrong": Path(question["path"]).read_bytes() != payload(number)}
            view = reader.open(read_handle(question["handle"])) if "handle" in question else views.pop(number, None)
            if view is None:
                return {}
            wrong = bytes(view.data) != payload(number)  # must not change while the view is held
            if question.get("hold"):
                views[number] = view
            else:
                view.release()
            return {"wrong": wrong}

        serve(answer)


def serve(answer: Callable[[Json], Json]) -> None:
    for line in sys.stdin:
        try:
            values = answer(json.loads(line))
        except HandOverError as error:
            values = {"failed": error.reason}
        except FileNotFoundError:
            values = {"failed": "gone"}
        sys.stdout.write(json.dumps(values) + "\n")
        sys.stdout.flush()


def test_killed_writers_and_readers_cause_no_failure_no_wrong_read_and_no_leak(root):
    rnd = random.Random(SEED)

    def janitor(killed):
        if killed or rnd.random() < 0.1:
            reclaim(root, clock())

    with closing(Soak(root, SEED)) as session:
        session.run(HAND_OVERS, KILLS, janitor)
        assert session.outcomes[READ] > HAND_OVERS // 2, session.outcomes
        assert session.outcomes[FELL_BACK] >= 1, session.outcomes
    deadline = time.monotonic() + 60  # only ends a hang: leases of the dead last a second
    while ledger(root, clock()).bytes:
        reclaim(root, clock())
        assert time.monotonic() < deadline, ledger(root, clock())
        time.sleep(0.05)
    assert os.listdir(root) == []


if __name__ == "__main__":
    {"write": write, "read": read}[sys.argv[1]](sys.argv[2])
