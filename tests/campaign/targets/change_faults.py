"""Target ``change_faults``: a deployment of a real control plane is rolled out or scaled, and one fault hits a process.

An input is a line: the command of the victim, the fault, the change, the moment of the change at which the fault
begins, and a number from which the rest is drawn. ``mmrouter up`` runs a resource as it is at the start, so these pods
are those of the level ``cluster``: the operator and the controllers change them, and a hollow kubelet runs them as
processes.
"""

import random
import time
from contextlib import ExitStack, closing, suppress
from typing import Any

import httpx
import psutil
from campaign.faults import clock
from campaign.faults.clients import Clients
from campaign.faults.cluster_pods import ClusterPods, missing_programs, running_cluster
from campaign.faults.delay import Delay, measured
from campaign.faults.injection import OF_THE_CLOCK, PROCESSES, Victim, injected, without_clocks
from campaign.faults.isolation import SHM
from campaign.faults.observation import LAG, Frontend, Observer, Recorder
from campaign.targets.faults import DEADLY, MUTE, OBSERVE_SECONDS, SECONDS, TRUTH_SECONDS, WATCH_SECONDS, FaultTarget
from cluster.load import describe, is_ready
from cluster.resources import MARK, apply, is_done, resource
from services import service
from waiting import repeating, wait_for

OF_A_PROCESS = ("kill", "stop", "descriptors", "memory", "file_size")
"""A full disk would be the kubelet's, which the test plays."""
MOMENTS = {"rollout": ("begin", "new", "old"), "grow": ("begin", "new"), "shrink": ("begin", "old")}
"""Change -> when the fault begins: with the change, when a new pod runs, or when an old one ends. The victim is that
pod where it has such a process.
"""
PARTS = {"engines": "worker", "frontends": "frontend"}
FEW, MANY = 2, 3  # replicas
CHANGED_SECONDS = 600.0  # ends a hang: a change is complete within half a minute on an idle machine
CHANGES_OF_A_CLUSTER = 30  # a machine has addresses for 252 pods
DRAWS = [
    f"{command} {fault} {change}_{part} {moment}"
    for command, faults in (
        *((command, (*OF_A_PROCESS, *OF_THE_CLOCK)) for command in PROCESSES),
        *(("sidecar", ("feed_cut",)), ("vllm", ("engine_cut",))),
    )
    for fault in faults
    for change, moments in MOMENTS.items()
    for part in PARTS
    for moment in moments
]


class ChangeFaults(FaultTarget):
    """One control plane and deployment; after a fault that broke a promise, others."""

    name = "change_faults"
    limit_s = 2400.0  # above the sum of all waits

    def __init__(self) -> None:
        super().__init__()
        self._began = False

    @classmethod
    def missing(cls) -> str:
        return super().missing() or missing_programs()

    @classmethod
    def left_out(cls) -> str:
        return without_clocks()

    def lines(self, source: random.Random) -> list[str]:
        known = [line for line in DRAWS if not (line.split()[1] in OF_THE_CLOCK and clock.missing())]
        return source.sample(known, len(known))

    def check(self, data: bytes) -> str:
        command, fault, changed, moment, number = data.decode().split()
        change, part = changed.split("_")
        began = self._began and self._changes < CHANGES_OF_A_CLUSTER
        self._began = False  # whatever goes wrong from here on, the next input gets another deployment
        if not began:
            self._start()
        broken = self._fault(command, fault, change, part, moment, int(number), random.Random(data))
        self.count(data, broken)
        self._began = True
        return f"{command} {fault} {changed} {moment}"

    def _start(self) -> None:
        self._running.close()
        self._replicas = dict.fromkeys(PARTS, FEW)
        self._marks = dict.fromkeys(PARTS, 0)
        self._changes = 0
        folder = self._folder / f"{time.monotonic_ns()}"
        (folder / "cluster").mkdir(parents=True)
        if not clock.missing():
            self._library = clock.build(folder)
        plane = self._running.enter_context(running_cluster(folder / "cluster"))
        namespace = self._running.enter_context(plane.namespace())
        self._pods = ClusterPods(plane, namespace, folder / "demo")
        generation = self._apply()
        wait_for(lambda: self._done(generation), CHANGED_SECONDS, "Ready", known=lambda: describe(plane, namespace))
        self._pods.write()
        self._observer = self._running.enter_context(closing(Observer(self._pods)))
        self._recorder = self._running.enter_context(closing(Recorder(self._pods)))
        self._url = self._running.enter_context(service(self._pods.endpoints()))

    def _apply(self) -> int:
        """Apply the resource as it is wanted now; return its generation."""
        body = resource(frontends=self._replicas["frontends"], replicas=self._replicas["engines"])
        if not clock.missing():
            clock.preload(body, self._library)
        spec = body["spec"]
        for part, where in (("frontends", spec["frontend"]), ("engines", spec["pools"][0])):
            where.setdefault("podTemplate", {})["metadata"] = {"annotations": {MARK: f"{self._marks[part]}"}}
        self._changes += 1
        return int(apply(self._pods.plane, self._pods.namespace, body)["metadata"]["generation"])

    def _done(self, generation: int) -> bool:
        """Whether the resource is reported as Ready, and its pods are those that it asks for, and no others."""
        ready = is_done(self._pods.plane, self._pods.namespace, "demo", generation)
        return ready and all(self._as_wanted(part, self._pods.pods(role)) for part, role in PARTS.items())

    def _as_wanted(self, part: str, pods: list[dict[str, Any]]) -> bool:
        marks = [pod["metadata"]["annotations"][MARK] for pod in pods if is_ready(pod)]
        return marks == [f"{self._marks[part]}"] * self._replicas[part] and len(pods) == len(marks)

    def _prepare(self, change: str, part: str) -> None:
        """Have as many replicas as the change begins with."""
        if self._replicas[part] == (wanted := MANY if change == "shrink" else FEW):
            return
        self._replicas[part] = wanted
        generation = self._apply()
        wait_for(lambda: self._done(generation), CHANGED_SECONDS, f"{wanted} {part}")

    def _fault(
        self, command: str, fault: str, change: str, part: str, moment: str, number: int, dice: random.Random
    ) -> list[str]:
        self._prepare(change, part)
        self._observer.workers_wanted = self._replicas["engines"]
        if broken := self._settle():
            return broken
        shared = set(SHM.iterdir())
        self._recorder.begin()
        counting = time.monotonic() + LAG
        clients = Clients(self._url, "demo", number)
        clients.may_cut = command == "router" and fault in DEADLY
        with ExitStack() as during:
            delay = during.enter_context(measured())
            during.enter_context(repeating(self._recorder.observe, OBSERVE_SECONDS))
            during.enter_context(clients.asking())
            time.sleep(max(0.0, counting - time.monotonic()))
            began = time.monotonic()
            generation, victim = self._change(change, part, moment, command, dice)
            with ExitStack() as lasting:
                with suppress(psutil.NoSuchProcess):  # a replaced pod may end before the fault begins
                    lasting.enter_context(injected(fault, victim, self._disk))
                broken += self._watch(victim, fault, generation, delay)
            broken += self._complete(generation)
            self.keep_largest(**{"s until a change is complete": round(time.monotonic() - began, 1)})
            self._observer.workers_wanted = self._replicas["engines"]
            broken += self._recover()
            clients.ask(dice)
        broken += self._judge(self._recorder, clients, victim, delay)
        broken += self._after(self._observer, clients, complete=False)  # a frontend's decisions end with its pod
        if left := {path for path in set(SHM.iterdir()) - shared if path.is_file()}:  # folders are pods' own
            broken.append(f"left in {SHM}: {sorted(left)[:3]}")
        return broken

    def _change(self, change: str, part: str, moment: str, command: str, dice: random.Random) -> tuple[int, Victim]:
        """Begin a change; return its generation, and a victim when the moment has come."""
        before = {pod["metadata"]["name"] for pod in self._pods.pods(PARTS[part])}
        if change == "rollout":
            self._marks[part] += 1
        else:
            self._replicas[part] = MANY if change == "grow" else FEW
        generation = self._apply()
        return generation, wait_for(
            lambda: self._victim(part, moment, command, before, dice), CHANGED_SECONDS, f"{moment} {part}", every=0.1
        )

    def _victim(self, part: str, moment: str, command: str, before: set[str], dice: random.Random) -> Victim | None:
        """Return a victim, ``None`` where the moment has not come."""
        pods = self._pods.pods(PARTS[part])
        running = self._pods.processes(command)
        chosen = set(running)
        if moment != "begin":
            names = {pod["metadata"]["name"]: "deletionTimestamp" in pod["metadata"] for pod in pods}
            chosen = {name for name, ends in names.items() if (ends if moment == "old" else name not in before)}
            of_part = (command == "router") == (part == "frontends")
            if not chosen or (of_part and not chosen & running.keys()):
                return None
        pod = dice.choice(sorted(chosen & running.keys() or running))
        try:
            return Victim(command, pod, running[pod].environ()["POD_IP"], running[pod])
        except psutil.NoSuchProcess:
            return None

    def _watch(self, victim: Victim, fault: str, generation: int, delay: Delay) -> list[str]:
        """Wait while the fault lasts; return what the resource and frontends report that is not true."""
        broken, began = set(), time.monotonic()
        mute = (victim.command, fault) in MUTE
        while (passed := time.monotonic() - began) < SECONDS:
            broken |= self._untrue(generation)
            if mute and passed > TRUTH_SECONDS + 2 * delay.longest:
                broken |= {
                    f"{frontend['name']} shows {victim.pod} as verified, which has been silent"
                    for frontend in self._pods.frontends
                    if self._shows_verified(frontend, victim)
                }
            time.sleep(WATCH_SECONDS)
        return sorted(broken)

    def _shows_verified(self, frontend: Frontend, victim: Victim) -> bool:
        try:
            workers = self._observer.workers(frontend)
        except (httpx.HTTPError, ValueError):  # it may end now
            return False
        return any(each["name"] == victim.pod and each["standing"] == "verified" for each in workers)

    def _untrue(self, generation: int) -> set[str]:
        """Return whether Ready is reported of the new resource while pods of the old one are there."""
        if not is_done(self._pods.plane, self._pods.namespace, "demo", generation):
            return set()
        found = set()
        for part, role in PARTS.items():
            left = [pod for pod in self._pods.pods(role) if "deletionTimestamp" not in pod["metadata"]]
            old = [pod for pod in left if pod["metadata"]["annotations"][MARK] != f"{self._marks[part]}"]
            if old or len(left) != self._replicas[part]:
                found.add(f"Ready, with {len(left)} {part}, {len(old)} of them old")
        return found

    def _complete(self, generation: int) -> list[str]:
        """Wait until the change is complete; return what was reported that is not true."""
        broken, deadline = set(), time.monotonic() + CHANGED_SECONDS
        while not self._done(generation):
            broken |= self._untrue(generation)
            if time.monotonic() > deadline:
                return [f"not complete: {describe(self._pods.plane, self._pods.namespace)}", *sorted(broken)]
            time.sleep(WATCH_SECONDS)
        return sorted(broken)
