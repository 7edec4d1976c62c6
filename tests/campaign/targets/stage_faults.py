"""Target ``stage_faults``: engines that work in stages, one drawn fault at a time under a load with images.

An input is a line: the example, the role of the victim, the fault, and a number from which the rest is drawn. What
single workers promise under faults is the target ``faults``; here every engine that a request passes through may fail.
"""

import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self

import httpx
from campaign.faults.clients import Clients
from campaign.faults.injection import Victim, inject
from campaign.faults.isolation import SHM, isolate, leave
from campaign.faults.observation import Observer
from campaign.target import BrokenPropertyError, Target
from campaign.targets.faults import SECONDS, SETTLE_SECONDS, WATCH_SECONDS, Faults
from local.rig import deployed, example
from waiting import wait_for

STAGES = {
    "demo-disaggregated.yaml": ("encoder", "prefill", "decode"),
    "demo-disaggregated-sglang.yaml": ("prefill", "decode"),
    "demo-encoders-sglang.yaml": ("encoder", "worker"),
    "demo-handover.yaml": ("renderer", "worker"),
}
"""Example -> roles of its engines."""
FAULTS = ("kill", "stop", "descriptors", "memory")
DRAWS = [f"{file} {role} {fault}" for file, roles in STAGES.items() for role in roles for fault in FAULTS]


class StageFaults(Target):
    """One deployment per example in turn; after a fault that broke a promise, another one."""

    name = "stage_faults"
    short = 0
    in_process = False
    limit_s = 1200.0  # above the sum of all waits
    missing = Faults.missing

    def __init__(self) -> None:
        super().__init__()
        self._order: list[bytes] = []
        self._example = ""
        self._stack, self._running = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        self._disk = isolate()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mmrouter-stages-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self._stack.close()
        leave(self._disk)

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        """Draw every fault once before any of them again, those of an example one after the other."""
        if not self._order:
            examples = source.sample(list(STAGES), len(STAGES))
            drawn = source.sample(DRAWS, len(DRAWS))
            drawn.sort(key=lambda line: examples.index(line.split()[0]))
            self._order = [f"{line} {source.randrange(1000)}".encode() for line in drawn]
        return self._order.pop()

    def check(self, data: bytes) -> str:
        file, role, fault, number = data.decode().split()
        if file != self._example:
            self._start(file)
        broken = self._fault(role, fault, int(number), random.Random(data))
        self.totals["faults"] += 1
        if broken:
            self._example = ""
            raise BrokenPropertyError(f"{data.decode()}: " + "; ".join(broken[:5]))
        return f"{file} {role} {fault}"

    def _start(self, file: str) -> None:
        """Replace the deployment by one of another example. Raises ``TimeoutError`` if the new one is not verified."""
        self._running.close()
        if left := [path for path in SHM.rglob("*") if path.is_file()]:
            raise BrokenPropertyError(f"left in {SHM} by {self._example}: {sorted(left)[:3]}")
        resource, enter = example(file), self._running.enter_context
        resource["spec"]["frontend"]["replicas"] = 2
        self._deployment = enter(deployed(self._folder, resource))
        self._observer = enter(closing(Observer(self._deployment)))
        self._example = file
        if wrong := self._settle():
            raise TimeoutError("; ".join(wrong))

    def _fault(self, role: str, fault: str, number: int, dice: random.Random) -> list[str]:
        victim = self._victim(role, dice)
        clients = Clients(self._deployment.url, "demo", number, pictures=True)
        broken: list[str] = []
        with clients.asking():
            wait_for(lambda: clients.answers.outcomes.total() >= 8, 60, "clients get answers")
            undo = inject(fault, victim, self._disk)
            try:
                broken += self._watch()
            finally:
                undo()
            began = time.monotonic()
            broken += self._settle()
            self.keep_largest(**{"s until every engine is verified": round(time.monotonic() - began, 1)})
        broken += clients.answers.broken
        for outcome, count in clients.answers.outcomes.items():
            self.totals[outcome] += count
        self.keep_largest(**{"s for an answer": round(clients.answers.slowest, 1)})
        return broken

    def _victim(self, role: str, dice: random.Random) -> Victim:
        """Draw an engine of a role. Pods are named by their pool, whose name begins as the role does."""
        kind = "sglang" if "sglang" in self._example else "vllm"
        found = self._deployment.processes(kind)
        pod = dice.choice(sorted(name for name in found if name.removeprefix("demo-").startswith(role[:6])))
        return Victim(kind, pod, found[pod].environ()["POD_IP"], found[pod])

    def _watch(self) -> list[str]:
        """Wait while the fault lasts; return which frontends, all untouched, are not ready or do not answer."""
        broken, began = set(), time.monotonic()
        while time.monotonic() - began < SECONDS:
            for number in range(len(self._deployment.controls)):
                try:
                    if not self._observer.ready(number):
                        broken.add(f"frontend {number} is not ready")
                except httpx.HTTPError as error:
                    broken.add(f"frontend {number} does not answer: {type(error).__name__}")
            time.sleep(WATCH_SECONDS)
        return sorted(broken)

    def _settle(self) -> list[str]:
        """Wait until every index equals its cache; return where it does not within the deadline."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while wrong := self._observer.differences():
            if time.monotonic() > deadline:
                return [f"not settled within {SETTLE_SECONDS:g} s", *wrong]
            time.sleep(WATCH_SECONDS)
        return []
