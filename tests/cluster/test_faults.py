"""Whatever breaks between operator and API server, or ends the operator: the same children are there in the end."""

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from cluster.controlplane import ControlPlane, wait_for
from cluster.operators import ACCOUNT, NAMESPACE, install, operator
from cluster.proxy import BROKEN, BROKEN_AFTER, CONFLICT, THROTTLED, Fault, Proxy, proxy
from cluster.resources import Object, apply, bare, children, complete, condition, delete, resource, status

SETTLE_SECONDS = 60
"""A deadline: pauses between tries grow, and of five writes one fails."""


@pytest.fixture
def between(crd: ControlPlane) -> Iterator[Proxy]:
    with proxy(crd) as made:
        yield made


class Zygote:
    """Starts operators that kill themselves; see ``zygote.py``."""

    def __init__(self, plane: ControlPlane) -> None:
        install(plane)
        self._kubeconfig = plane.kubeconfig_for(NAMESPACE, ACCOUNT)
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("zygote.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=plane.log_file("zygote").open("ab"),
            text=True,
            start_new_session=True,
        )
        plane.guard.began(self._process.pid)

    def run(self, namespace: str, calls: int) -> int:
        """Run an operator for one namespace until its call number ``calls`` was answered; returns its exit status."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        arguments = [
            *(
                f"--kubeconfig={self._kubeconfig}",
                f"--namespace={namespace}",
                "--identity=mortal",
                "--bind=127.0.0.1:0",
            ),
            *(f"--lease-namespace={NAMESPACE}", "--lease-duration=2", "--renew-deadline=1.5", "--retry-period=0.3"),
            "--log-format=text",
        ]
        self._process.stdin.write(json.dumps({"arguments": arguments, "calls": calls}) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


def alike(plane: ControlPlane, namespace: str) -> Object:
    """Return the children of a namespace without what differs between two equal deployments."""
    found = {f"{kind} {name}": bare(child) for (kind, name), child in children(plane, namespace).items()}
    for name, child in found.items():
        if name.startswith("Service "):
            # Given by the server, another one for every Service.
            own = ("clusterIP", "clusterIPs")
            child["spec"] = {field: value for field, value in child["spec"].items() if field not in own}
    text = json.dumps(found, sort_keys=True)
    # Fingerprints of keys that are made anew for every deployment, and what is made of these.
    for (kind, _), child in children(plane, namespace).items():
        if kind == "Deployment":
            for value in (child["spec"]["template"]["metadata"].get("annotations") or {}).values():
                text = text.replace(json.dumps(value), '"annotation"')
    made: Object = json.loads(text.replace(namespace, "namespace"))
    return {name: child for name, child in made.items() if not name.startswith("Secret ")}


def settled(plane: ControlPlane, namespace: str, body: Object) -> bool:
    """Whether all children are there and the status is about this generation."""
    return complete(plane, body, namespace) and bool(condition(plane, "SpecValid", namespace))


def test_an_operator_killed_after_any_of_its_calls_leaves_what_the_next_one_completes(crd: ControlPlane) -> None:
    body = resource()
    zygote = Zygote(crd)
    with ExitStack() as stack:
        stack.callback(zygote.close)
        left: list[str] = []
        while True:
            namespace = stack.enter_context(crd.namespace())
            apply(crd, namespace, body)
            ended = zygote.run(namespace, len(left))
            if ended == -signal.SIGALRM:
                break  # it never came so far: every call of a first reconcile has been the last one once
            assert ended == -signal.SIGKILL, crd.log_file("zygote").read_text()[-3000:]
            left.append(namespace)
        assert len(left) > 12
        # Some calls are under way together, so not every kill leaves one child more than the one before.
        assert len({len(children(crd, name)) for name in left}) > 4
        with operator(crd), crd.namespace() as undisturbed:
            apply(crd, undisturbed, body)
            for name in (undisturbed, *left):
                wait_for(partial(settled, crd, name, body), SETTLE_SECONDS, f"{name} is complete")
            whole = alike(crd, undisturbed)
            for number, name in enumerate(left):
                found = alike(crd, name)
                different = [child for child in whole.keys() | found.keys() if whole.get(child) != found.get(child)]
                assert different == [], f"killed after {number} calls"


@pytest.mark.parametrize("fault", [CONFLICT, THROTTLED, BROKEN, BROKEN_AFTER], ids=["409", "429", "500", "500-after"])
def test_answers_of_a_server_in_trouble_are_survived(
    crd: ControlPlane, between: Proxy, namespace: str, fault: Fault
) -> None:
    dice, lock = random.Random(fault.status), threading.Lock()

    def sometimes(method: str, path: str) -> Fault | None:
        with lock:
            return fault if method != "GET" and "/leases" not in path and dice.random() < 0.2 else None

    between.faults = sometimes
    body = resource()
    with operator(crd, server=between.url) as replica:
        apply(crd, namespace, body)
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "all children are there")
        assert between.injected > 3
        delete(crd, "Service", namespace, "demo")
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "the deleted child is back")
        assert replica.process.poll() is None


def test_watches_that_expire_lose_nothing(crd: ControlPlane, between: Proxy, namespace: str) -> None:
    dice = random.Random(410)
    between.watch_seconds = 0.5
    body = resource()
    with operator(crd, server=between.url):
        # What they begin again with fails sometimes, too.
        between.faults = lambda method, path: BROKEN if method == "GET" and dice.random() < 0.2 else None
        apply(crd, namespace, body)
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "all children are there")
        for _ in range(3):
            between.expired = 0
            wait_for(lambda: between.expired, 30, "a watch expires")
            delete(crd, "Service", namespace, "demo")
            wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "the deleted child is back")


def test_a_restart_of_the_api_server_is_survived(crd: ControlPlane, namespace: str) -> None:
    body = resource()
    with operator(crd) as replica:
        apply(crd, namespace, body)
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "all children are there")
        crd.restart_apiserver()
        delete(crd, "Service", namespace, "demo")
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "the deleted child is back")
        apply(crd, namespace, resource(frontends=2))
        wait_for(
            lambda: status(crd, namespace).get("observedGeneration") == 2, SETTLE_SECONDS, "the change has been seen"
        )
        assert replica.process.poll() is None
