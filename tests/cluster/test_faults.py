"""Whatever breaks between operator and API server, or ends the operator: the same children are there in the end."""

import itertools
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import pytest
from cluster.changes import CHANGES, runs, settled
from cluster.controlplane import ControlPlane
from cluster.deployments import pod_metrics
from cluster.faults import BROKEN, BROKEN_AFTER, CONFLICT, THROTTLED, Fault, Proxy, Zygote, alike, proxy, unlike
from cluster.hollow_kubelet import Hollow
from cluster.operators import holder, operator
from cluster.resources import Object, apply, delete, resource, status
from long_form import IS_LONG, parameters
from waiting import wait_for

from mmrouter_operator.runtime.operator import EXIT, REFRESH

SETTLE_SECONDS = 60
"""A deadline: pauses between tries grow, and of four writes one fails."""
BAD_REQUEST, NOT_FOUND = Fault(400, "BadRequest"), Fault(404, "NotFound")
STEP = 1 if IS_LONG else 6
"""An operator is killed after every call of a reconcile, or after every sixth one."""
LISTED = "/api/v1/services"
MOST_TRIES = 8
"""Of a list between two reads of the APIs. It is tried every 10 s at the latest, so a dozen times in two minutes."""
POLL = 0.2
"""Seconds between looks that cost the server some dozen requests."""


@pytest.fixture
def between(crd: ControlPlane) -> Iterator[Proxy]:
    with proxy(crd) as made:
        yield made


@pytest.mark.parametrize(
    "fault", parameters([CONFLICT, THROTTLED, BROKEN, BROKEN_AFTER], CONFLICT, BROKEN_AFTER), ids=str
)
def test_answers_of_a_server_in_trouble_are_survived(
    crd: ControlPlane, between: Proxy, namespace: str, fault: Fault
) -> None:
    numbers, lock = itertools.count(1), threading.Lock()

    def sometimes(method: str, path: str) -> Fault | None:
        with lock:
            return fault if method != "GET" and "/leases" not in path and next(numbers) % 4 == 0 else None

    between.faults = sometimes
    body = resource()
    with operator(crd, server=between.url) as replica:
        apply(crd, namespace, body)
        wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "all children are there")
        assert between.injected > 1
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
        for _ in range(2):
            between.expired = 0
            wait_for(lambda: between.expired, 30, "a watch expires")
            delete(crd, "Service", namespace, "demo")
            wait_for(lambda: settled(crd, namespace, body), SETTLE_SECONDS, "the deleted child is back")


def test_an_operator_that_cannot_discover_its_kind_ends(crd: ControlPlane, between: Proxy) -> None:
    answered = itertools.count()

    def refuse_kopf(method: str, path: str) -> Fault | None:
        # The operator itself reads it first, kopf after it.
        return BAD_REQUEST if path == "/apis/mmrouter.io/v1alpha1" and next(answered) else None

    between.faults = refuse_kopf
    with operator(crd, "undiscovered", server=between.url, wait=False) as replica:
        wait_for(lambda: replica.process.poll() is not None, EXIT - 10, "it ends")
        assert replica.process.returncode == 1


def test_an_operator_that_cannot_list_a_kind_reads_soon_whether_it_is_still_served(
    crd: ControlPlane, between: Proxy
) -> None:
    asked: list[str] = []

    def gone(method: str, path: str) -> Fault | None:
        if path in ("/apis", LISTED):
            asked.append(path)
        return NOT_FOUND if path == LISTED else None

    def reads() -> list[int]:
        """Return the places of the reads of the APIs after the first refusal."""
        return [at for at, path in enumerate(asked) if path == "/apis" and LISTED in asked[:at]]

    between.faults = gone
    with operator(crd, "unlisted", server=between.url, wait=False) as replica:
        first, second, *_ = wait_for(lambda: len(reads()) > 1 and reads(), REFRESH, "the APIs are read twice more")
        assert second - first < MOST_TRIES
        assert replica.process.poll() is None


@pytest.mark.parametrize(
    "path", ["/api/v1/services", "/apis/mmrouter.io/v1alpha1/mmrouterdeployments"], ids=["a child", "the resource"]
)
def test_an_operator_whose_watch_is_refused_for_good_releases_the_lease_and_ends(
    crd: ControlPlane, between: Proxy, path: str
) -> None:
    between.watch_seconds = 0.5
    with operator(crd, f"refused-{path.rpartition('/')[2]}", server=between.url) as replica:
        # The next watch and the list after it are refused.
        between.faults = lambda method, requested: BAD_REQUEST if requested == path else None
        wait_for(lambda: replica.process.poll() is not None, EXIT - 10, "it ends")
        assert replica.process.returncode == 1
        assert holder(crd) == ""


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


@dataclass
class Killed:
    """Namespaces in which the same has changed: one in peace, in each of the others under an operator that died.

    ``disturbed``: calls of the operator before its death -> namespace.
    """

    undisturbed: str
    disturbed: dict[int, str] = field(default_factory=dict)


@pytest.fixture(scope="module")
def killed(crd: ControlPlane, kubelet: Hollow) -> Iterator[Mapping[str, Killed]]:
    """All changes, while an operator goes on from where the killed ones were; it starts once for all of them."""
    with ExitStack() as stack:
        stack.enter_context(pod_metrics(crd))
        zygote = Zygote(crd)
        stack.callback(zygote.close)
        found: dict[str, Killed] = {}
        for name, change in CHANGES.items():
            one = found[name] = Killed(stack.enter_context(crd.namespace()))
            calls = 0
            states: list[Object] = [{}]
            for body in filter(None, (change.before, change.after)):
                apply(crd, one.undisturbed, body)
                ended, calls = zygote.run(one.undisturbed)
                assert ended == 0, zygote.log()[-3000:]
                _await_frontend(crd, one.undisturbed, body)
                states.append(alike(crd, one.undisturbed))
            assert change.changed <= set(unlike(*states[-2:])), unlike(*states[-2:])
            one.disturbed = {number: stack.enter_context(crd.namespace()) for number in range(0, calls, STEP)}
        _prepare(crd, {name: CHANGES[key].before for key, one in found.items() for name in one.disturbed.values()})
        for name, one in found.items():
            for calls, namespace in one.disturbed.items():
                apply(crd, namespace, CHANGES[name].after)
                ended, _ = zygote.run(namespace, calls)
                # A run may make fewer calls than the undisturbed one: statuses and events depend on the pods' timing.
                late = calls > max(one.disturbed) // 2
                assert ended == -signal.SIGKILL or (ended == 0 and late), zygote.log()[-3000:]
        with operator(crd):
            yield found


def _prepare(plane: ControlPlane, before: Mapping[str, Object]) -> None:
    some = {namespace: body for namespace, body in before.items() if body}
    with operator(plane):
        for namespace, body in some.items():
            apply(plane, namespace, body)
        for namespace, body in some.items():
            wait_for(partial(settled, plane, namespace, body), SETTLE_SECONDS, f"{namespace} is complete", every=POLL)
            _await_frontend(plane, namespace, body)


def _await_frontend(plane: ControlPlane, namespace: str, body: Object) -> None:
    if "podTemplate" not in body["spec"]["frontend"]:
        wait_for(partial(runs, plane, namespace), SETTLE_SECONDS, f"{namespace} has a frontend", every=POLL)


@pytest.mark.parametrize("change", CHANGES)
def test_an_operator_killed_after_any_call_of_a_reconcile_leaves_what_the_next_one_completes(
    crd: ControlPlane, killed: Mapping[str, Killed], change: str
) -> None:
    one = killed[change]
    for namespace in (one.undisturbed, *one.disturbed.values()):
        done = partial(settled, crd, namespace, CHANGES[change].after)
        wait_for(done, SETTLE_SECONDS, f"{namespace} is complete", every=POLL)
    whole = alike(crd, one.undisturbed)

    def differs(namespace: str) -> list[str]:
        return unlike(whole, alike(crd, namespace))

    def same(namespace: str) -> bool:
        return not differs(namespace)

    for calls, namespace in one.disturbed.items():
        # Deletions go on in the background.
        what = f"{namespace} is equal, killed after {calls} calls"
        wait_for(partial(same, namespace), SETTLE_SECONDS, what, every=POLL, known=partial(differs, namespace))
