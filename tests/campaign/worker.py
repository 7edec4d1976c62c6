"""A process that checks inputs of one target, and its supervision.

The process writes each input to a file before it checks it. An input that ends the process, or that it does not finish
in time, is therefore known: it is counted as a crash or a hang, and another process continues.
"""

import faulthandler
import gc
import mmap
import os
import pickle
import signal
import struct
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from campaign import corpus
from campaign.target import Counts, Failure, Kind, Target, run
from campaign.targets import TARGETS

ROOT = Path(__file__).resolve().parents[2]
_HEAD = struct.Struct("QQ")  # number and length of the input that is being checked
_MAX_INPUT = 1 << 20
_POLL_S, _SAVE_S = 0.2, 1.0
START_S = 600.0  # until the first input: a target may start processes
MAX_PARTS = 20  # processes of one run: a target that ends each of them is reported soon enough


@dataclass(frozen=True)
class Task:
    """A target's share of a campaign: ``count`` inputs (0: any number) within ``seconds``."""

    target: str
    seed: str
    seconds: float
    count: int
    folder: Path

    def arguments(self, part: int) -> tuple[str, ...]:
        return (self.target, f"{self.seed}.{part}", f"{self.seconds:.1f}", str(self.count), str(self.folder))


def work(target: Target, seed: str, seconds: float, count: int, folder: Path) -> None:
    """Run a target in this process; write its counts to ``folder`` every second and at the end."""
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # shows where an input hangs
    end, saved = time.monotonic() + seconds, time.monotonic()
    with (folder / "current").open("r+b") as file:
        current = mmap.mmap(file.fileno(), _HEAD.size + _MAX_INPUT)
    number = 0

    def before(data: bytes) -> None:
        nonlocal number
        number += 1
        piece = data[:_MAX_INPUT]
        current[_HEAD.size : _HEAD.size + len(piece)] = piece
        current[: _HEAD.size] = _HEAD.pack(number, len(piece))

    def save(counts: Counts) -> None:
        (folder / "counts.new").write_bytes(pickle.dumps(counts))
        (folder / "counts.new").replace(folder / "counts")

    def go_on(counts: Counts) -> bool:
        nonlocal saved
        now = time.monotonic()
        if now - saved >= _SAVE_S:
            saved = now
            save(counts)
        if now < end and not (count and counts.inputs >= count):
            return True
        current[: _HEAD.size] = _HEAD.pack(0, 0)  # a target may take its time to end
        return False

    gc.collect()
    gc.freeze()  # the collection before each sample of the memory then takes 1 ms and not 100
    known = corpus.load().get(target.name, {})
    save(run(target, seed, list(known.values()), go_on, before))


def supervise(task: Task, limit_s: float) -> Counts:
    """Run a target in processes of its own, one after the other where an input ends one; return all counts."""
    total, end, task_left = Counts(), time.monotonic() + task.seconds, task
    task.folder.mkdir(parents=True, exist_ok=True)
    for part in range(MAX_PARTS):
        done = _run_part(task_left, part, limit_s)
        total.add(done)
        ended_early = done.kinds["hang"] or "the process ended" in "".join(f.message for f in done.failures[-1:])
        seconds, count = end - time.monotonic(), task.count - total.inputs
        if not ended_early or seconds <= 0 or (task.count and count <= 0):
            break
        task_left = Task(task.target, task.seed, seconds, count if task.count else 0, task.folder)
    return total


def _run_part(task: Task, part: int, limit_s: float) -> Counts:
    current = task.folder / "current"
    current.write_bytes(bytes(_HEAD.size + _MAX_INPUT))
    (task.folder / "counts").unlink(missing_ok=True)
    command = [sys.executable, "-m", "campaign.worker", *task.arguments(part)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "PYTHONFAULTHANDLER": "1"}
    with (task.folder / "log").open("ab") as log, current.open("rb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            hung = _wait(process, file.fileno(), limit_s)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        file.seek(0)
        number, length = _HEAD.unpack(file.read(_HEAD.size))
        data = file.read(length)
    saved = task.folder / "counts"
    counts: Counts = pickle.loads(saved.read_bytes()) if saved.is_file() else Counts()
    if hung or process.returncode:
        kind: Kind = "hang" if hung else "crash"
        what = f"no end within {limit_s:.0f} s" if hung else f"the process ended with status {process.returncode}"
        tail = (task.folder / "log").read_text(errors="replace").splitlines()[-30:]
        counts.inputs = max(counts.inputs, number)
        counts.fail(Failure(kind, "\n".join((what, *tail)), data))
        counts.outcomes[kind] += 1
    return counts


def _wait(process: "subprocess.Popen[bytes]", file: int, limit_s: float) -> bool:
    """Wait for the end of a process; return whether one input took longer than the limit instead."""
    last, since = 0, _scheduled(process.pid)
    while process.poll() is None:
        time.sleep(_POLL_S)
        (number,) = struct.unpack_from("Q", os.pread(file, 8, 0))
        now = _scheduled(process.pid)
        if number != last:
            last, since = number, now
        elif now - since > (limit_s if number else max(limit_s, START_S)):
            process.send_signal(signal.SIGUSR1)
            time.sleep(1)  # for the traceback that the signal makes the process write
            return True
    return False


def _scheduled(pid: int) -> float:
    """Return seconds of a clock that stands still while the process waits for a CPU: a busy machine is no hang."""
    waited = 0
    with suppress(OSError, IndexError, ValueError):  # not every kernel counts it
        waited = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return time.monotonic() - waited / 1e9


def main(arguments: list[str]) -> None:
    name, seed, seconds, count, folder = arguments
    work(TARGETS[name](), seed, float(seconds), int(count), Path(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
