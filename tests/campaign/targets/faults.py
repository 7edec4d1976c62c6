"""Target ``faults``: ``mmrouter up`` with simulated engines, one drawn fault at a time, with and without load.

An input is a line: the command of the victim, the fault, whether there is load, and a number from which the rest is
drawn. The target needs root and Linux namespaces, so the gate does not run it; ``tests/local/test_failures.py`` does
the most frequent faults there.
"""

import os
import random
import shutil
import tempfile
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Self

import httpx
from campaign.faults import clock
from campaign.faults.clients import Clients
from campaign.faults.delay import Delay, measured
from campaign.faults.drawn_faults import DrawnFaults
from campaign.faults.injection import (
    OF_A_PROCESS,
    OF_THE_CLOCK,
    OF_THE_NETWORK,
    PROCESSES,
    Victim,
    injected,
    without_clocks,
)
from campaign.faults.isolation import SHM, isolate, leave
from campaign.faults.observation import LAG, Observer, Recorder
from local.rig import deployed, example
from waiting import repeating

SECONDS = 10.0  # that a fault lasts
OBSERVE_SECONDS = 0.3
WATCH_SECONDS = 0.25
TOOLS = ("ip", "iptables", "mount", "tc")
SETTLE_SECONDS = 120.0  # a deadline: indexes equal the caches within a few seconds
LOOK_UPS = 20  # decisions of an input's last answers
TRUTH_SECONDS = 5.0  # after which no router uses the index of a sidecar that sends nothing, beside delays
MUTE = frozenset({("sidecar", "stop"), ("sidecar", "feed_cut")})
"""Victim and fault after which no frame of the victim's pod reaches a router."""
DEADLY = frozenset({"kill", "memory", "disk_full", "kill_clock_back", "kill_clock_forward"})
"""Faults that may end the victim; the streams of a router end with it."""
DRAWS = [
    *((command, fault) for command in PROCESSES for fault in (*OF_A_PROCESS, *OF_THE_CLOCK)),
    *(("vllm" if fault == "engine_cut" else "sidecar", fault) for fault in OF_THE_NETWORK),
]


class FaultTarget(DrawnFaults):
    """A target that injects faults into local deployments, isolated from the rest of the machine."""

    def __init__(self) -> None:
        super().__init__()
        self._stack, self._running = ExitStack(), ExitStack()

    @classmethod
    def missing(cls) -> str:
        if os.geteuid():
            return "it needs root, for namespaces"
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        lacking = [tool for tool in TOOLS if shutil.which(tool, path=path) is None]
        return f"it needs {', '.join(lacking)}" if lacking else ""

    def __enter__(self) -> Self:
        self._disk = isolate()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mmrouter-faults-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()
        self._stack.close()
        leave(self._disk)

    def _deploy(self, resource: dict[str, Any]) -> None:
        """Start a deployment and wait until its engines are verified. Raises ``TimeoutError``."""
        self._deployment = self._running.enter_context(deployed(self._folder, resource))
        self._observer = self._running.enter_context(closing(Observer(self._deployment)))
        if wrong := self._settle():
            raise TimeoutError("; ".join(wrong))

    def _count(self, clients: Clients) -> None:
        """Add what the clients of an input were answered to the campaign's figures."""
        for outcome, count in clients.answers.outcomes.items():
            self.totals[outcome] += count
        self.keep_largest(**{"s for an answer": round(clients.answers.slowest, 1)})

    def _false_claims(self, recorder: Recorder, clients: Clients) -> list[str]:
        """Return what answers claimed to have been cached that could not be; a router's end loses its decisions."""
        checker, wrong = recorder.claims(clients.answers.claims, complete=not clients.may_cut)
        self.totals["answers whose cached tokens were checked"] += checker.checked
        self.totals["blocks that answers claimed"] += checker.blocks
        return wrong[:3]

    def _judge(self, recorder: Recorder, clients: Clients, victim: Victim, delay: Delay) -> list[str]:
        """Count what clients and routers did during an input; return the promises that answers and decisions broke."""
        recorder.observe()
        slack = {victim.pod: 2 * SECONDS} if victim.command == "router" else {}
        checker = recorder.checked(slack, delay.longest)
        self.keep_largest(**{"s that a thread waited for a CPU": round(delay.longest, 2)})
        self._count(clients)
        self.totals["times of a clock that was set"] += recorder.stepped
        self.totals["reads of a cache"] += checker.decisions
        self.totals["blocks claimed"] += checker.blocks
        wrong = [f"{each.kind}: {each.decision}" for each in checker.violations[:3]]
        return [*clients.answers.broken, *wrong, *self._false_claims(recorder, clients)]

    def _after(self, observer: Observer, clients: Clients, *, complete: bool) -> list[str]:
        """Return which ended requests frontends still count, and which decisions they give of another request."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while (counted := observer.in_flight()) and time.monotonic() < deadline:
            time.sleep(WATCH_SECONDS)
        claims = clients.answers.claims[-LOOK_UPS:]
        self.totals["answers whose decision was looked up"] += len(claims)
        return counted + observer.other_decisions(claims, complete=complete)

    def _recover(self) -> list[str]:
        """Settle, and keep how long it takes."""
        began = time.monotonic()
        broken = self._settle()
        self.keep_largest(**{"s until every index equals its cache": round(time.monotonic() - began, 1)})
        return broken

    def _settle(self) -> list[str]:
        """Wait until every index equals its cache; return where it does not within the deadline."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while wrong := self._observer.differences():
            if time.monotonic() > deadline:
                return [f"not settled within {SETTLE_SECONDS:g} s", *wrong]
            time.sleep(0.1)
        return []


class Faults(FaultTarget):
    """One deployment; after a fault that broke a promise, another one."""

    name = "faults"

    @classmethod
    def left_out(cls) -> str:
        return without_clocks()

    def __enter__(self) -> Self:
        super().__enter__()
        self._start()
        return self

    def lines(self, source: random.Random) -> list[str]:
        lines = [
            f"{command} {fault} {load}"
            for command, fault in DRAWS
            if not (fault in OF_THE_CLOCK and clock.missing())
            for load in ("idle", "load")
        ]
        return source.sample(lines, len(lines))

    def check(self, data: bytes) -> str:
        command, fault, load, number = data.decode().split()
        dice = random.Random(data)
        broken = self._fault(command, fault, load == "load", int(number), dice)
        if broken:
            try:
                self._running.close()
                self._start()
            except Exception as error:  # the next input gets a deployment of another process
                raise SystemExit(f"{data.decode()}: {broken[:5]}; no new deployment: {error}") from error
        self.count(data, broken)
        return f"{command} {fault} {load}"

    def _start(self) -> None:
        resource = example()
        if not clock.missing():
            clock.preload(resource, clock.build(self._folder))
        self._deploy(resource)
        self._recorder = self._running.enter_context(closing(Recorder(self._deployment)))

    def _fault(self, command: str, fault: str, load: bool, number: int, dice: random.Random) -> list[str]:
        deployment = self._deployment
        victim = self._victim(command, dice)
        shared = set(SHM.rglob("*"))
        self._recorder.begin()
        counting = time.monotonic() + LAG
        clients = Clients(deployment.url, "demo", number)
        clients.may_cut = command == "router" and fault in DEADLY
        broken: list[str] = []
        with ExitStack() as during:
            delay = during.enter_context(measured())
            during.enter_context(repeating(self._recorder.observe, OBSERVE_SECONDS))
            if load:
                during.enter_context(clients.asking())
                time.sleep(max(0.0, counting - time.monotonic()))
            with injected(fault, victim, self._disk):
                broken += self._watch(victim, fault, delay)
                if fault in OF_THE_CLOCK:  # a wrong clock is no reason for a wrong index, however long it lasts
                    broken += self._settle()
            broken += self._recover()
            clients.ask(dice)
        broken += self._judge(self._recorder, clients, victim, delay)
        broken += self._after(self._observer, clients, complete=not clients.may_cut)
        if left := set(SHM.rglob("*")) - shared:
            broken.append(f"left in {SHM}: {sorted(left)[:3]}")
        return broken

    def _victim(self, command: str, dice: random.Random) -> Victim:
        pod, process = dice.choice(sorted(self._deployment.processes(command).items()))
        return Victim(command, pod, process.environ()["POD_IP"], process)

    def _watch(self, victim: Victim, fault: str, delay: Delay) -> list[str]:
        """Wait while the fault lasts; return what frontends say that is not true, and which of them say nothing."""
        broken, began = set(), time.monotonic()
        while (passed := time.monotonic() - began) < SECONDS:
            for frontend in self._deployment.frontends:
                if frontend["name"] == victim.pod or fault in OF_THE_NETWORK[2:]:
                    continue
                try:
                    is_ready = self._observer.ready(frontend)
                    workers = {each["name"]: each["standing"] for each in self._observer.workers(frontend)}
                except (httpx.HTTPError, ValueError) as error:
                    broken.add(f"{frontend['name']}, untouched, does not answer: {type(error).__name__}")
                    continue
                if not is_ready:
                    broken.add(f"{frontend['name']}, untouched, is not ready")
                mute = (victim.command, fault) in MUTE and passed > TRUTH_SECONDS + 2 * delay.longest
                if mute and workers.get(victim.pod) == "verified":
                    broken.add(f"{frontend['name']} shows {victim.pod} as verified, which has been silent")
            time.sleep(WATCH_SECONDS)
        return sorted(broken)
