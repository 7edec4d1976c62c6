"""Target ``gateway_faults``: gateways and endpoint pickers as victims of one drawn fault at a time, under load.

An input is a line: the kind of the victim, the fault, and a number from which the rest is drawn. Two gateways of two
deployments stand behind a Service; two pickers serve one Envoy, where this machine has it.
"""

import random
import time
from contextlib import ExitStack, closing

import httpx
import psutil
from campaign.faults.clients import Clients
from campaign.faults.injection import Victim, injected
from campaign.faults.observation import Observer
from campaign.faults.restarted import Restarted
from campaign.targets.faults import SECONDS, SETTLE_SECONDS, WATCH_SECONDS, FaultTarget
from gateway.gateways import ALIASES, SMALL, Gateway, gateway_process
from local.load import ready
from local.rig import deployed, example, running
from services import service
from waiting import wait_for

from mmrouter_cli.local.envoy import find_envoy
from mmrouter_cli.local.folders import LocalError

FAULTS = ("kill", "stop", "descriptors", "memory")
ENDS_STREAMS = {"gateway": frozenset({"kill", "memory"}), "picker": frozenset({"kill", "memory", "stop"})}
"""Faults after which an answer that passes through the victim may break off."""
START_SECONDS = 180.0
GATEWAYS, PORT = 2, 8080


def _without_envoy() -> str:
    try:
        find_envoy()
    except LocalError as error:
        return f"{error}"
    return ""


class GatewayFaults(FaultTarget):
    """Gateways, then pickers; after a fault that broke a promise, others."""

    name = "gateway_faults"

    def __init__(self) -> None:
        super().__init__()
        self._kind = ""
        self._gateways: list[Restarted[Gateway]] = []
        self._observers: dict[str, Observer] = {}  # by the name of a deployment, which is its model's, too

    @classmethod
    def left_out(cls) -> str:
        reason = _without_envoy()
        return f"without pickers: {reason}" if reason else ""

    def lines(self, source: random.Random) -> list[str]:
        """Return the lines of a kind one after the other, so that one start serves them."""
        kinds = ["gateway"] if _without_envoy() else source.sample(["gateway", "picker"], 2)
        return [f"{kind} {fault}" for kind in kinds for fault in source.sample(FAULTS, len(FAULTS))]

    def check(self, data: bytes) -> str:
        kind, fault, number = data.decode().split()
        known, self._kind = self._kind, ""  # whatever goes wrong from here on, the next input gets others
        if kind != known:
            self._start(kind)
        broken = self._fault(kind, fault, int(number), random.Random(data))
        self.count(data, broken)
        self._kind = kind
        return f"{kind} {fault}"

    def _start(self, kind: str) -> None:
        self._running.close()
        self._gateways = []
        stack = self._running
        resource = example()
        if kind == "picker":
            started = [deployed(self._folder, resource, options=("--gateway", "envoy"), start_seconds=START_SECONDS)]
        else:
            resource["spec"]["pools"][0]["replicas"] = 1
            started = [deployed(self._folder, resource), running(SMALL, start_seconds=START_SECONDS)]
        deployments = [stack.enter_context(each) for each in started]
        self._observers = {
            str(each.run["deployment"]): stack.enter_context(closing(Observer(each))) for each in deployments
        }
        self._url = deployments[0].url
        if kind == "gateway":
            for _ in range(GATEWAYS):
                self._gateways.append(Restarted(lambda: gateway_process("--config", str(ALIASES))))
                stack.enter_context(self._gateways[-1].running())
            wait_for(lambda: len(self._ready()) == GATEWAYS, START_SECONDS, "every gateway is ready")
            self._url = stack.enter_context(service(self._ready))
        if left := self._all_back():
            raise TimeoutError("; ".join(left))

    def _ready(self) -> list[tuple[str, int]]:
        return [(each.now.host, PORT) for each in self._gateways if ready(each.now.host)]

    def _victim(self, kind: str, dice: random.Random) -> Victim:
        if kind == "gateway":
            gateway = dice.choice(self._gateways).now
            return Victim(kind, gateway.host, gateway.host, psutil.Process(gateway.process.pid))
        pod, process = dice.choice(sorted(self._observers["demo"].deployment.processes("router").items()))
        return Victim(kind, pod, process.environ()["POD_IP"], process)

    def _fault(self, kind: str, fault: str, number: int, dice: random.Random) -> list[str]:
        victim = self._victim(kind, dice)
        loads = {model: Clients(self._url, model, number) for model in self._observers}
        broken: list[str] = []
        with ExitStack() as during:
            for clients in loads.values():
                clients.may_cut = fault in ENDS_STREAMS[kind]
                during.enter_context(clients.asking())
            with injected(fault, victim, self._disk):
                broken += self._watch(kind, victim)
            began = time.monotonic()
            broken += self._all_back()
            self.keep_largest(**{"s until everything is ready": round(time.monotonic() - began, 1)})
            time.sleep(WATCH_SECONDS)
        for model, clients in loads.items():
            complete = kind == "gateway" or not clients.may_cut  # a picker's decisions end with it
            broken += clients.answers.broken + self._after(self._observers[model], clients, complete=complete)
            self._count(clients)
        return broken

    def _watch(self, kind: str, victim: Victim) -> list[str]:
        """Wait while the fault lasts; return which gateways or pickers that are not the victim are not ready."""
        others = [each.now.host for each in self._gateways]
        if kind == "picker":
            frontends = self._observers["demo"].deployment.frontends
            others = [str(httpx.URL(frontend["control"]).host) for frontend in frontends]
        others = [host for host in others if host != victim.address]
        broken, began = set(), time.monotonic()
        while time.monotonic() - began < SECONDS:
            broken |= {f"{host}, untouched, is not ready" for host in others if not ready(host)}
            time.sleep(WATCH_SECONDS)
        return sorted(broken)

    def _all_back(self) -> list[str]:
        """Wait until every process is ready and every model is answered; return what is not within the deadline."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while left := self._not_back():
            if time.monotonic() > deadline:
                return [f"not back within {SETTLE_SECONDS:g} s", *left]
            time.sleep(WATCH_SECONDS)
        return []

    def _not_back(self) -> list[str]:
        left = [wrong for observer in self._observers.values() for wrong in observer.differences()]
        for each in self._gateways:
            left += [] if ready(each.now.host) else [f"the gateway {each.now.host} is not ready"]
        return left or [text for name in self._observers if (text := self._unanswered(name))]

    def _unanswered(self, name: str) -> str:
        """Return why the model of a deployment is not answered by it; empty: it is."""
        body = {"model": name, "max_tokens": 1, "messages": [{"role": "user", "content": "Hello"}]}
        try:
            answer = httpx.post(f"{self._url}/v1/chat/completions", json=body, timeout=60)
        except httpx.HTTPError as error:
            return f"{name}: {error!r}"
        by = answer.headers["x-mmrouter-deployment"] if self._gateways else name
        if answer.status_code != 200 or by != name:
            return f"{name}: {answer.status_code} {answer.text[:200]}"
        return ""
