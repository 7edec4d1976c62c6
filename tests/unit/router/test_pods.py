"""Who a pod is, and the watch under an API server that misbehaves (one that does not: tests/cluster)."""

import asyncio
import json
import os
import ssl
from contextlib import asynccontextmanager
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import pytest
from cluster.access import make_keys
from unit.router.rig import running
from waiting import until

from mmrouter_kube import list_watch
from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.membership import Peer, membership_of, parse_pod, watch_pods
from mmrouter_router.fleet.workers import Member
from mmrouter_router.telemetry.metrics import Metrics

POD = {
    "metadata": {
        "uid": "u1",
        "name": "demo-worker-1",
        "labels": {"mmrouter.io/deployment": "demo", "mmrouter.io/pool": "worker", "mmrouter.io/role": "worker"},
    },
    "spec": {"nodeName": "n1"},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.7",
        "initContainerStatuses": [{"name": "sidecar", "started": True, "ready": True}],
        "containerStatuses": [{"name": "engine", "started": False, "ready": False}],
        "conditions": [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "False"}],
    },
}


def changed(**places):
    """The pod with values at dotted places; ``None`` takes the field away."""
    pod = deepcopy(POD)
    for place, value in places.items():
        *parents, last = place.split("__")
        at = pod
        for parent in parents:
            at = at[parent]
        if value is None:
            at.pop(last, None)
        else:
            at[last] = value
    return pod


def labelled(**labels):
    names = {"mmrouter.io/deployment": "demo", **{f"mmrouter.io/{name}": value for name, value in labels.items()}}
    return changed(metadata__labels=names)


@pytest.mark.parametrize("deleted", [None, "2026-01-01T00:00:00Z"])
def test_engine_pod_is_a_member_which_drains_once_deleted(deleted):
    found, draining = parse_pod(changed(metadata__deletionTimestamp=deleted)), deleted is not None
    assert found == Member("u1", "demo-worker-1", "10.0.0.7", "worker", "worker", "n1", ready=True, draining=draining)


BOTH = {"compatibility": "ab12", "kv-layout": "cd34"}


def test_labels_determine_compatibility():
    for labels, found in (({}, ""), ({"compatibility": "ab12"}, "ab12"), (BOTH, "ab12-cd34")):
        assert parse_pod(labelled(role="prefill", pool="p", **labels)).compatibility == found


def test_started_sidecar_makes_a_pod_ready_and_its_condition_does_not():
    assert parse_pod(POD).ready
    starting = [{"name": "sidecar", "started": False}]
    ready = [{"type": "Ready", "status": "True"}]
    for statuses in (starting, None):
        assert not parse_pod(changed(status__conditions=ready, status__initContainerStatuses=statuses)).ready


def gated(*true, gates=("mmrouter.io/routable", "mmrouter.io/verified")):
    named = [{"conditionType": gate} for gate in gates]
    conditions = [{"type": gate, "status": "True" if gate in true else "False"} for gate in gates]
    return changed(spec__readinessGates=named, status__conditions=conditions)


def test_pod_is_admitted_once_both_gates_are_open():
    routable, verified = gates = "mmrouter.io/routable", "mmrouter.io/verified"
    assert [parse_pod(gated(*true)).admitted for true in ((), (routable,), (verified,), gates)] == [False] * 3 + [True]
    unwritten = gated(*gates)
    unwritten["status"]["conditions"] = []
    assert not parse_pod(unwritten).admitted


def test_pod_without_own_gates_is_admitted():
    assert parse_pod(POD).admitted
    assert parse_pod(gated(gates=("example.com/warm",))).admitted


def test_renderer_is_ready_with_its_containers():
    pod = labelled(pool="render", role="renderer")
    assert not parse_pod(pod).ready
    pod["status"]["conditions"] = [{"type": "ContainersReady", "status": "True"}, {"type": "Ready", "status": "False"}]
    assert parse_pod(pod).ready


@pytest.mark.parametrize("role", ["worker", "prefill", "decode", "encoder", "renderer"])
def test_every_role_is_parsed(role):
    assert parse_pod(labelled(pool="p", role=role)).role == role


IGNORED = {
    "no or an empty address": [changed(status__podIP=None), changed(status__podIP="")],
    "ended": [changed(status__phase="Failed"), changed(status__phase="Succeeded")],
    "no pool or an unknown role": [labelled(**own) for own in ({"pool": "p", "role": "new"}, {"role": "worker"}, {})],
    "no role": [labelled(pool="p")],
    "incomplete": [{}, {"metadata": None, "status": None}, {"metadata": {"uid": "u"}, "status": {}}],
}


@pytest.mark.parametrize("case", IGNORED)
def test_object_that_is_no_pod_of_a_pool_is_ignored(case):
    assert [parse_pod(pod) for pod in IGNORED[case]] == [None] * len(IGNORED[case])


@pytest.mark.parametrize(("ready", "deleted"), [(True, None), (False, None), (True, "2026-01-01T00:00:00Z")])
def test_frontend_is_a_peer_which_takes_requests_while_it_is_ready_and_stays(ready, deleted):
    pod = labelled(role="frontend")
    pod["metadata"]["deletionTimestamp"] = deleted
    pod["status"]["conditions"] = [{"type": "Ready", "status": str(ready)}]
    assert parse_pod(pod) == Peer("u1", "demo-worker-1", "10.0.0.7", ready=ready and deleted is None)


def test_membership_excludes_the_router_itself():
    mine, other = Peer("f1", "demo-frontend-a", "10.0.0.1"), Peer("f2", "demo-frontend-b", "10.0.0.2")
    found = membership_of([other, parse_pod(POD), mine], "f1", leaving=False)
    assert (found.peers, found.members, found.leaving) == ((other,), (parse_pod(POD),), False)


def test_membership_does_not_depend_on_order():
    second = parse_pod(changed(metadata__uid="u2", metadata__name="demo-worker-0"))
    everybody = [parse_pod(POD), second, Peer("f2", "b", "10.0.0.2"), Peer("f3", "a", "10.0.0.3")]
    assert membership_of(everybody, "f1", leaving=False) == membership_of(everybody[::-1], "f1", leaving=False)


IP = f"127.85.{os.getpid() % 250}.1"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A certificate for the server's address."""
    folder = tmp_path_factory.mktemp("pki") / "keys"
    make_keys(folder, IP)
    return folder


@pytest.fixture
def api(keys, tmp_path):
    """Make a server that answers with these entries."""
    return partial(Api, keys, tmp_path)


class Api:
    """Answers with the script's entries (status, headers, pieces) in turn, the last one for good, and then closes."""

    def __init__(self, keys, folder, *script) -> None:
        self.asked: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self._keys, self._script = keys, list(script)
        for name, text in {"namespace": "here", "token": "one", "ca.crt": (keys / "ca.crt").read_text()}.items():
            (folder / name).write_text(text)
        self.folder = folder
        self.told, self.metrics = [], Metrics()

    async def _connection(self, reader, writer) -> None:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        self.path, query = urlsplit(lines[0].split()[1])[2:4]
        self.asked.append({name: values[0] for name, values in parse_qs(query).items()})
        self.tokens += [line.split()[-1] for line in lines if line.lower().startswith("authorization:")]
        status, headers, pieces = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        head = [f"HTTP/1.1 {status} X", "content-type: application/json", "connection: close", *headers, "", ""]
        writer.write("\r\n".join(head).encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        if status == 200 and "watch" in self.asked[-1] and not pieces:
            await asyncio.sleep(30)
        writer.close()

    @asynccontextmanager
    async def running(self):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self._keys / "apiserver.crt", self._keys / "apiserver.key")
        server = await asyncio.start_server(self._connection, IP, 0, ssl=context)
        port = server.sockets[0].getsockname()[1]
        where = ApiServer(IP, str(port), self.folder)
        async with running(self.follow(where)):
            yield self
        server.close()

    def follow(self, where: ApiServer):
        return watch_pods(where, "demo", "own", self.told.append, self.metrics)

    def errors(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("mmrouter_discovery_errors_total", {"reason": reason}) or 0.0


def pod(name: str, version: str) -> dict:
    return {**POD, "metadata": {**POD["metadata"], "name": name, "uid": name, "resourceVersion": version}}


def listing(version: str, *pods: dict):
    content = {"kind": "PodList", "metadata": {"resourceVersion": version}, "items": list(pods)}
    return 200, (), [json.dumps(content).encode()]


def event(kind: str, obj: dict) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def names(roster) -> list[str]:
    return [member.name for member in roster.members]


QUIET, FIRST = (200, (), []), listing("5", pod("a", "3"))


async def test_watch_resumes_from_the_last_version(api):
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "9"}}
    events = [event("ADDED", pod("b", "7")), event("BOOKMARK", bookmark)]
    async with api(FIRST, (200, (), events), QUIET).running() as server:
        await until(lambda: len(server.asked) == 3)
        assert [query.get("resourceVersion") for query in server.asked] == [None, "5", "9"]
        assert [names(roster) for roster in server.told] == [["a"], ["a", "b"]]


async def test_irrelevant_event_is_not_published(api):
    other = pod("a", "6")
    other["metadata"] = {**other["metadata"], "annotations": {"seen": "yes"}}
    async with api(FIRST, (200, (), [event("MODIFIED", other)]), QUIET).running() as server:
        await until(lambda: len(server.asked) == 3)
        assert server.asked[2]["resourceVersion"] == "6"
        assert len(server.told) == 1


async def test_retry_after_is_respected(api):
    busy = (429, ("retry-after: 1",), [b"Too many requests, please try again later.\n"])
    began = asyncio.get_running_loop().time()
    async with api(busy, FIRST, QUIET).running() as server:
        await until(lambda: server.told)
        assert asyncio.get_running_loop().time() - began >= 1.0
        assert server.errors("throttled") == 1


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ((200, (), [event("ADDED", pod("b", "7"))[:-40]]), "broken"),
        ((200, (), [b"no json\n"]), "broken"),
        ((200, (), [b"[]\n"]), "broken"),
        ((200, ("content-length: 900",), [event("BOOKMARK", pod("x", "6"))[:50]]), "unreachable"),
        ((500, (), [b"oops"]), "server"),
        ((403, (), [b'{"kind":"Status","code":403}']), "forbidden"),
    ],
    ids=["half an event", "no json", "another shape", "cut short", "a 500", "a 403"],
)
async def test_broken_watch_is_resumed_without_dropping_members(api, broken, reason):
    news = (200, (), [event("ADDED", pod("b", "8"))])
    async with api(FIRST, broken, news, QUIET).running() as server:
        await until(lambda: len(server.told) == 2)
        assert [names(roster) for roster in server.told] == [["a"], ["a", "b"]]
        assert server.asked[2]["resourceVersion"] == "5"
        assert server.errors(reason) == 1


@pytest.mark.parametrize("how", ["event", "status"])
async def test_expired_version_relists_and_drops_removed_pods(api, how):
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (99)"}
    gone = (200, (), [event("ERROR", status)]) if how == "event" else (410, (), [json.dumps(status).encode()])
    async with api(FIRST, gone, listing("100", pod("b", "98")), QUIET).running() as server:
        await until(lambda: len(server.told) == 2)
        assert [names(roster) for roster in server.told] == [["a"], ["b"]]
        assert server.asked[2].get("resourceVersion") is None
        assert server.errors("expired") == 1


async def test_invalid_list_is_requested_again(api):
    async with api((200, (), [b"<html>"]), FIRST, QUIET).running() as server:
        await until(lambda: server.told)
        assert server.errors("broken") == 1


async def test_a_watch_that_worked_and_is_cut_is_renewed_at_once_each_time(api, monkeypatch):
    monkeypatch.setattr(list_watch, "STEADY_SECONDS", -1.0)  # every watch has worked for long enough
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)

    monkeypatch.setattr(list_watch, "asyncio", SimpleNamespace(sleep=pause))
    bookmark = event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "6"}})
    cut = (200, (), [bookmark, b'{"type"'])  # the connection ends within an event
    async with api(listing("5"), *[cut] * 8).running() as server:
        await until(lambda: len(server.asked) >= 9)
    assert 0 < max(pauses) <= list_watch.FIRST_BACKOFF


async def test_immediately_ending_watch_backs_off(api, monkeypatch):
    monkeypatch.setattr(list_watch, "STEADY_SECONDS", 60.0)  # on a busy machine, "at once" may take a second
    ended = (200, (), [event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "6"}})])
    async with api(listing("5"), ended).running() as server:
        await until(lambda: len(server.asked) >= 2)  # the list and a watch
        began = asyncio.get_running_loop().time()
        await until(lambda: len(server.asked) >= 5)
        # Three pauses, the first of which is half of the shortest backoff at least, and each the double of the last.
        assert asyncio.get_running_loop().time() - began >= list_watch.FIRST_BACKOFF / 2 * (1 + 2 + 4) - 0.01


async def test_the_token_is_read_for_every_request(api, tmp_path):
    async with api(FIRST, (500, (), [b"x"]), (500, (), [b"x"]), QUIET).running() as server:
        await until(lambda: len(server.tokens) == 2)
        (tmp_path / "token").write_text("two\n")
        await until(lambda: len(server.tokens) == 4)
        assert (server.tokens[0], server.tokens[-1]) == ("one", "two")
