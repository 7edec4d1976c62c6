"""Target ``operator_faults``: one drawn fault of the operator while a resource is created, changed or deleted.

An input is a line: the fault, the change, and a number from which the rest is drawn. The API server and the controllers
are real; pods find no node, so how far the children are depends on the operator alone. The operator is started again
when it ends, as a kubelet does, and reaches the API server through a proxy without TLS, as the certificates of a test
are too new for a clock that is an hour late.
"""

import random
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psutil
from artefacts import run_tool
from campaign.faults import clock
from campaign.faults.cluster_pods import ROOT, missing_programs
from campaign.faults.delay import measured
from campaign.faults.drawn_faults import DrawnFaults
from campaign.faults.injection import OF_THE_CLOCK, Victim, injected, without_clocks
from campaign.faults.restarted import Restarted
from cluster.changes import CHANGES, Change, runs, settled
from cluster.controlplane import ControlPlane, control_plane
from cluster.deployments import LABEL, pod_metrics
from cluster.faults import alike, proxy, unlike
from cluster.hollow_kubelet import hollow
from cluster.operators import BRIEF, operator
from cluster.resources import Object, apply, children, delete, path, status
from waiting import wait_for

from mmrouter_operator.cluster.operator_kinds import CORE_CHILDREN
from mmrouter_operator.model.kinds import RESOURCE

FAULTS = ("kill", "stop", "descriptors", "memory", "file_size", *OF_THE_CLOCK)
ALL = {**CHANGES, "delete": Change(CHANGES["update"].before, {}, frozenset())}
SECONDS = 10.0  # that a fault lasts
EARLIEST, LATEST = -0.5, 1.5  # seconds from the change to the fault, beside a reconcile's usual second
SETTLE_SECONDS = 120.0  # of the rest, as in the tests of the level cluster
WATCH_SECONDS = 0.2


class OperatorFaults(DrawnFaults):
    """One control plane and, beside the namespace of each input, one per change in which nothing is disturbed."""

    name = "operator_faults"

    def __init__(self) -> None:
        super().__init__()
        self._undisturbed: dict[str, str] = {}
        self._stack = ExitStack()

    @classmethod
    def missing(cls) -> str:
        return missing_programs()

    @classmethod
    def left_out(cls) -> str:
        return without_clocks()

    def __enter__(self) -> Self:
        stack = self._stack
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mmrouter-operator-")))
        for name in ("cluster", "home"):
            (folder / name).mkdir()
        programs = Path(run_tool("cluster.go_programs", "kubernetes"))
        self._plane = stack.enter_context(control_plane(folder / "cluster", programs, ROOT / "crds"))
        stack.enter_context(hollow(self._plane)).node("node-0")
        stack.enter_context(pod_metrics(self._plane))
        server = stack.enter_context(proxy(self._plane)).url
        env = {"HOME": str(folder / "home")}
        if not clock.missing():
            env["LD_PRELOAD"] = str(clock.build(folder))
        self._operator = Restarted(lambda: operator(self._plane, server=server, options=BRIEF, env=env, wait=False))
        stack.enter_context(self._operator.running())
        wait_for(self._operator.now.leads, SETTLE_SECONDS, "the operator leads")
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def lines(self, source: random.Random) -> list[str]:
        known = [fault for fault in FAULTS if not (fault in OF_THE_CLOCK and clock.missing())]
        lines = [f"{fault} {change}" for fault in known for change in ALL]
        return source.sample(lines, len(lines))

    def check(self, data: bytes) -> str:
        fault, name, _ = data.decode().split()
        wanted = self._undisturbed.get(name) or self._undisturbed.setdefault(name, self._change_without_fault(name))
        with self._plane.namespace() as namespace:
            broken = self._fault(fault, ALL[name], namespace, wanted, random.Random(data))
        self.count(data, broken)
        return f"{fault} {name}"

    def _change_without_fault(self, name: str) -> str:
        """Make a change without a fault; return its namespace."""
        namespace = self._stack.enter_context(self._plane.namespace())
        self._begin(namespace, ALL[name])
        self._apply(namespace, ALL[name])
        wait_for(lambda: self._settled(namespace, ALL[name]), SETTLE_SECONDS, f"{name} without a fault")
        return namespace

    def _begin(self, namespace: str, change: Change) -> None:
        """Have a namespace as it is before a change."""
        if body := change.before:
            apply(self._plane, namespace, body)
            wait_for(lambda: self._is_complete(namespace, body), SETTLE_SECONDS, "the resource before the change")

    def _is_complete(self, namespace: str, body: Object) -> bool:
        """Whether all children of a resource are there, and a frontend that finds a node runs."""
        unscheduled = "podTemplate" in body["spec"]["frontend"]
        return settled(self._plane, namespace, body) and (unscheduled or runs(self._plane, namespace))

    def _apply(self, namespace: str, change: Change) -> None:
        if change.after:
            apply(self._plane, namespace, change.after)
        else:
            delete(self._plane, RESOURCE, namespace, "demo")

    def _settled(self, namespace: str, change: Change) -> bool:
        return self._is_complete(namespace, change.after) if change.after else not children(self._plane, namespace)

    def _fault(self, fault: str, change: Change, namespace: str, wanted: str, dice: random.Random) -> list[str]:
        self._begin(namespace, change)
        at = dice.uniform(EARLIEST, LATEST)
        ends, replica = self._operator.ends, self._operator.now
        victim = Victim("operator", replica.identity, replica.address, psutil.Process(replica.process.pid))
        with measured() as delay:
            if at >= 0:
                self._apply(namespace, change)
            time.sleep(abs(at))
            with injected(fault, victim, ROOT):
                if at < 0:
                    self._apply(namespace, change)
                broken = self._watch(namespace)
            began = time.monotonic()
            left: list[str] = ["not looked at"]
            while left and time.monotonic() - began < SETTLE_SECONDS + 10 * delay.longest:
                left = self._differences(namespace, change, wanted)
                time.sleep(WATCH_SECONDS)
        self.keep_largest(**{"s until all is as without a fault": round(time.monotonic() - began, 1)})
        self.keep_largest(**{"s that a thread waited for a CPU": round(delay.longest, 2)})
        self.totals["ends of the operator"] += self._operator.ends - ends
        return broken + left

    def _watch(self, namespace: str) -> list[str]:
        """Wait while the fault lasts; return what the resource reports that is not true."""
        broken, began = set(), time.monotonic()
        while time.monotonic() - began < SECONDS:
            found = self._plane.request("GET", path(RESOURCE, namespace, "demo"))
            conditions = found.json().get("status", {}).get("conditions", []) if found.is_success else []
            if any((each["type"], each["status"]) == ("Ready", "True") for each in conditions):
                broken.add("Ready, though no engine runs")
            time.sleep(WATCH_SECONDS)
        return sorted(broken)

    def _differences(self, namespace: str, change: Change, wanted: str) -> list[str]:
        """Return in which children and conditions a namespace differs from the undisturbed one, and orphans."""
        plane = self._plane
        if not self._settled(namespace, change):
            return ["not all children are there" if change.after else f"left: {sorted(children(plane, namespace))}"]
        found = [f"another {name}" for name in unlike(alike(plane, wanted), alike(plane, namespace))]
        owned = children(plane, namespace)
        for kind in CORE_CHILDREN:
            for item in plane.read(path(kind, namespace), labelSelector=f"{LABEL}=demo")["items"]:
                if (kind, item["metadata"]["name"]) not in owned:
                    found.append(f"{kind} {item['metadata']['name']} has no owner")
        if change.after:
            found += [
                f"{name}: {seen} instead of {right}"
                for name, (seen, right) in _paired(_conditions(plane, namespace), _conditions(plane, wanted)).items()
                if seen != right
            ]
        return found


def _conditions(plane: ControlPlane, namespace: str) -> dict[str, str]:
    return {each["type"]: f"{each['status']} {each['reason']}" for each in status(plane, namespace)["conditions"]}


def _paired(one: dict[str, str], other: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {name: (one.get(name), other.get(name)) for name in sorted(one.keys() | other.keys())}
