"""Reads by the plugin's NIXL way that fail in all the ways a renderer can. Run by the engine environment's Python.

    python nixl_reads.py PLUGIN_FOLDER ROUNDS > answer.json
    python nixl_reads.py PLUGIN_FOLDER offer             # the renderer: offers on stdout, until stdin ends

The answer holds for each step what its reads came to (``ok`` or a reason), whether any byte was wrong, the bytes that
the reader's pool had lent after it, its open files, and the reads that had not ended. UCX has tcp alone, so that a read
needs the other process.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LENGTH = 2_000_000
POOL = 16 << 20
READ_SECONDS = 1.0
SETTLE_SECONDS = 60.0


def offer() -> None:
    import msgspec

    from mmrouter_handover.plugin.nixl_transport import open_nixl
    from mmrouter_handover.plugin.wire import Field, Packer

    way, why = open_nixl("renderer", POOL)
    assert way, why
    for number in range(3):
        packer = Packer()
        node = packer.tensor("uint8", (LENGTH,), memoryview(bytes([number]) * LENGTH))
        plan = packer.pack("s", str(number), "image", [Field("pixels", "flat", node)], [])
        offered, release = way.offer(plan, 600)
        if number == 2:
            release()
        print(msgspec.json.encode(offered).decode(), flush=True)
    sys.stdin.read()


class Reading:
    def __init__(self, folder: str) -> None:
        from mmrouter_handover.plugin import nixl_transport
        from mmrouter_handover.plugin.wire import Nixl, read

        nixl_transport.READ_SECONDS = READ_SECONDS
        command = [sys.executable, __file__, folder, "offer"]
        self.renderer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.renderer.stdout is not None
        # NIXL writes its log there, too.
        lines = (line for line in self.renderer.stdout if line.startswith(b"{"))
        self.first, self.second, self.released = (read(next(lines), Nixl) for _ in range(3))
        way, why = nixl_transport.open_nixl("engine", POOL)
        assert way, why
        self.way = way
        self.steps: dict[str, Any] = {}

    def step(self, name: str, *offers: Any) -> None:
        from mmrouter_handover.shm import HandOverError

        came, wrong = [], 0
        for one in offers:
            try:
                wrong += self.way.read(one, lambda payload, one=one: payload[-LENGTH:] != self.payload(one))
                came.append("ok")
            except HandOverError as failed:
                came.append(failed.reason)
        stuck = self.way.stuck()
        lent, files = self.way.arena.leased_bytes, len(os.listdir("/proc/self/fd"))
        self.steps[name] = {"came": came, "wrong": wrong, "stuck": stuck, "lent": lent, "files": files}

    def stand_still(self) -> None:
        """Stop every thread of the renderer: on a busy machine one of them can answer after the signal was sent."""
        self.renderer.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self.renderer.pid}/task")
        while not all("State:\tT" in (each / "status").read_text() for each in threads.iterdir()):
            time.sleep(0.01)

    def payload(self, one: Any) -> bytes:
        return bytes([0 if one.address == self.first.address else 1]) * LENGTH

    def settled(self) -> bool:
        """Wait until no read that was given up still runs; return whether that came."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while self.way.stuck() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.way.stuck()


def reads(folder: str, rounds: int) -> dict[str, Any]:
    import msgspec

    reading = Reading(folder)
    first, second = reading.first, reading.second
    reading.step("well", first, second, first)
    reading.step("released", *[reading.released] * rounds)
    reading.step("no such memory", *[msgspec.structs.replace(first, address=4096)] * rounds)
    reading.step("another item", *[msgspec.structs.replace(first, checksum=1)] * rounds)
    reading.step("well after these", second, first)
    reading.stand_still()
    reading.step("standing still", *[first] * rounds)
    reading.renderer.send_signal(signal.SIGCONT)
    reading.steps["settled after it went on"] = reading.settled()
    reading.step("going on", second, first)
    reading.stand_still()
    reading.step("standing still again", first)
    reading.renderer.kill()
    reading.renderer.wait()
    reading.steps["settled after its end"] = reading.settled()
    reading.step("killed", *[first] * rounds)
    return reading.steps


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    if sys.argv[2] == "offer":
        offer()
        return
    out = os.dup(1)
    os.dup2(2, 1)  # NIXL's log
    answer = json.dumps(reads(sys.argv[1], int(sys.argv[2])))
    os.write(out, answer.encode())


if __name__ == "__main__":
    main()
