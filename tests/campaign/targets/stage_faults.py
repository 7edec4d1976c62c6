"""Target ``stage_faults``: engines that work in stages, one drawn fault at a time under a load with images.

An input is a line: the example, the victim's pool, the fault, and a number from which the rest is drawn. What single
workers promise under faults is the target ``faults``; here every engine that a request passes through may fail.
"""

import random
import time

import httpx
from campaign.faults.clients import Clients
from campaign.faults.injection import Victim, injected
from campaign.faults.isolation import SHM
from campaign.targets.faults import SECONDS, WATCH_SECONDS, FaultTarget
from local.rig import example

STAGES = {
    "demo-disaggregated.yaml": ("encode", "prefill", "decode"),
    "demo-disaggregated-sglang.yaml": ("prefill", "decode"),
    "demo-encoders-sglang.yaml": ("encoder", "worker"),
    "demo-handover.yaml": ("render", "worker"),
}
"""Example -> its pools."""
FAULTS = ("kill", "stop", "descriptors", "memory")
DRAWS = [f"{file} {pool} {fault}" for file, pools in STAGES.items() for pool in pools for fault in FAULTS]


class StageFaults(FaultTarget):
    """One deployment per example in turn; after a fault that broke a promise, another one."""

    name = "stage_faults"

    def __init__(self) -> None:
        super().__init__()
        self._example = ""

    def lines(self, source: random.Random) -> list[str]:
        """Return the lines of an example one after the other, so that one start serves them."""
        examples = source.sample(list(STAGES), len(STAGES))
        drawn = source.sample(DRAWS, len(DRAWS))
        return sorted(drawn, key=lambda line: examples.index(line.split()[0]))

    def check(self, data: bytes) -> str:
        file, pool, fault, number = data.decode().split()
        broken = [] if file == self._example else self._replace(file)
        broken += self._fault(pool, fault, int(number), random.Random(data))
        if broken or not self._order:  # else a later input ends the deployment
            broken += self._end()
        self.count(data, broken)
        return f"{file} {pool} {fault}"

    def _replace(self, file: str) -> list[str]:
        """Run another example in place of the present one; return what that one left in shared memory."""
        left = self._end()
        resource = example(file)
        resource["spec"]["frontend"]["replicas"] = 2
        self._deploy(resource)
        self._example = file
        return left

    def _end(self) -> list[str]:
        """End the deployment; return what it left in shared memory."""
        self._running.close()
        ended, self._example = self._example, ""
        left = sorted(path for path in SHM.rglob("*") if path.is_file()) if ended else []
        return [f"left in {SHM} by {ended}: {left[:3]}"] if left else []

    def _fault(self, pool: str, fault: str, number: int, dice: random.Random) -> list[str]:
        victim = self._victim(pool, dice)
        clients = Clients(self._deployment.url, "demo", number, pictures=True)
        broken: list[str] = []
        with clients.asking():
            with injected(fault, victim, self._disk):
                broken += self._watch()
            began = time.monotonic()
            broken += self._settle()
            self.keep_largest(**{"s until every engine is verified": round(time.monotonic() - began, 1)})
        broken += clients.answers.broken + self._after(self._observer, clients, complete=True)
        self._count(clients)
        return broken

    def _victim(self, pool: str, dice: random.Random) -> Victim:
        kind = "sglang" if "sglang" in self._example else "vllm"
        found = self._deployment.processes(kind)
        pod = dice.choice(sorted(name for name in found if name.startswith(f"demo-{pool}-")))
        return Victim(kind, pod, found[pod].environ()["POD_IP"], found[pod])

    def _watch(self) -> list[str]:
        """Wait while the fault lasts; return which frontends, all untouched, are not ready or do not answer."""
        broken, began = set(), time.monotonic()
        while time.monotonic() - began < SECONDS:
            for frontend in self._deployment.frontends:
                try:
                    if not self._observer.ready(frontend):
                        broken.add(f"{frontend['name']} is not ready")
                except httpx.HTTPError as error:
                    broken.add(f"{frontend['name']} does not answer: {type(error).__name__}")
            time.sleep(WATCH_SECONDS)
        return sorted(broken)
