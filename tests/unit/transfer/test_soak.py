"""Real processes, killed with -9 at random points: nothing is read wrong, nothing fails, nothing is left.

100 hand-overs with 20 kills; ``make soak`` sets MMROUTER_SOAK=1000, which is kills, with ten hand-overs for each.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter

import pytest
from unit.transfer import soakend
from unit.transfer.crashes import taken

from mmrouter_transfer import ledger, reclaim
from mmrouter_transfer.files import clock

SOAK = "MMROUTER_SOAK"
KILLS = int(os.environ.get(SOAK, "20"))
HAND_OVERS = 10 * KILLS if SOAK in os.environ else 100
LEFT_SECONDS = 5.0
HELD = 3
FELL_BACK = "fell back"


class EndedError(Exception):
    """The process was killed before it answered."""


class End:
    """A writer or a reader; the next one is started before this one is needed no more, because Python starts slowly."""

    def __init__(self, kind, root):
        self.kind, self.root = kind, root
        self.process, self.spare = self.start(), self.start()
        self.seconds = 0.002

    def start(self):
        command = [sys.executable, soakend.__file__, self.kind, str(self.root)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, kill_after=None, **question):
        """Return the answer; ``kill_after`` seconds after the question the process is killed, whatever it is doing."""
        if self.process.poll() is not None:
            self.replace()
        killer = None
        began = time.monotonic()
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
        return json.loads(line)

    def replace(self):
        close(self.process)
        self.process, self.spare = self.spare, self.start()

    def end(self):
        for process in (self.process, self.spare):
            process.kill()
            close(process)


def close(process):
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.fixture
def ends(root):
    writer, reader = End("write", root), End("read", root)
    yield writer, reader
    writer.end()
    reader.end()


def test_killed_writers_and_readers_fail_no_request_read_nothing_wrong_and_leave_no_byte(root, ends):
    writer, reader = ends
    rnd = random.Random(os.environ.get("MMROUTER_SOAK_SEED", "1"))
    kills = dict.fromkeys(rnd.sample(range(HAND_OVERS), KILLS))
    outcomes: Counter[str] = Counter()
    held, old = [], []
    for number in range(HAND_OVERS):
        victim = rnd.choice(ends) if number in kills else None
        after = {victim: rnd.uniform(0, 2 * victim.seconds)} if victim else {}
        outcomes[hand_over(number, writer, reader, after, held, old, rnd.random() < 0.3)] += 1
        if len(held) > HELD:
            let_go(reader, held.pop(0))
        if old and rnd.random() < 0.2:  # long after: it is what it was, or refused
            late = rnd.choice(old)
            answer = reader.ask(number=late[0], handle=late[1], hold=False)
            assert answer.get("wrong") is not True
            assert answer.get("failed", "stale") in ("stale", "gone")
        if victim or rnd.random() < 0.1:
            reclaim(root, clock())
    assert sum(outcomes.values()) == HAND_OVERS
    assert outcomes["read"] > HAND_OVERS // 2, outcomes
    assert outcomes[FELL_BACK] >= 1, outcomes
    for each in ends:
        each.end()
    assert nothing_is_left(root) < LEFT_SECONDS
    assert os.listdir(root) == []


def hand_over(number, writer, reader, after, held, old, hold):
    """One request: by hand-over, or by the re-fetch handle, which whoever asks still has. Return which.

    Anything else is an error: a payload that is wrong, or a refusal that nobody caused.
    """
    try:
        written = writer.ask(after.get(writer), number=number)
        if "failed" in written:
            assert written["failed"] == "full"
            return FELL_BACK
        handle = written["handle"]
        assert handle["refetch"] == str(number)
        old.append((number, handle))
        answer = reader.ask(after.get(reader), number=number, handle=handle, hold=hold)
    except EndedError:
        return FELL_BACK
    if "failed" in answer:
        assert number % 7 == 0, answer  # cancelled; nothing else may fail
        assert answer["failed"] == "stale"
        return FELL_BACK
    assert answer["wrong"] is False
    if hold:
        held.append(number)
    return "read"


def let_go(reader, number):
    try:
        assert reader.ask(number=number).get("wrong", False) is False
    except EndedError:  # killed while it held the view
        return


def nothing_is_left(root):
    """Return after how many seconds the janitor had cleared the folder."""
    began = time.monotonic()
    while taken(root):
        reclaim(root, clock())
        assert time.monotonic() - began < 4 * LEFT_SECONDS, ledger(root, clock())
        time.sleep(0.05)
    return time.monotonic() - began
