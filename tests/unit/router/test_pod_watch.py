"""A watch under an API server that misbehaves, as a real one does but not when asked to (that one: tests/cluster)."""

import asyncio
import json
import os
import ssl
from contextlib import asynccontextmanager
from urllib.parse import parse_qs, urlsplit

import pytest
from cluster.pki import make_keys
from unit.router.test_pods import POD

from mmrouter_kube import list_watch
from mmrouter_router.core.settings import ApiServer
from mmrouter_router.fleet.pod_watch import watch_pods
from mmrouter_router.telemetry.metrics import Metrics

IP = f"127.85.{os.getpid() % 250}.1"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A certificate for the server's address."""
    folder = tmp_path_factory.mktemp("pki") / "keys"
    make_keys(folder, IP)
    return folder


class Api:
    """Answers the script's entries one after the other, the last one for good. An entry is (status, headers, pieces);
    the connection is closed after it.
    """

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
        query = urlsplit(lines[0].split()[1]).query
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
        task = asyncio.create_task(watch_pods(where, "demo", "own", self.told.append, self.metrics))
        try:
            yield self
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            server.close()

    def errors(self, reason: str) -> float:
        return self.metrics.registry.get_sample_value("mmrouter_discovery_errors_total", {"reason": reason}) or 0.0

    async def until(self, condition) -> None:
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.005)


def pod(name: str, version: str) -> dict:
    return {**POD, "metadata": {**POD["metadata"], "name": name, "uid": name, "resourceVersion": version}}


def listing(version: str, *pods: dict):
    content = {"kind": "PodList", "metadata": {"resourceVersion": version}, "items": list(pods)}
    return 200, (), [json.dumps(content).encode()]


def event(kind: str, obj: dict) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode() + b"\n"


def names(roster) -> list[str]:
    return [member.name for member in roster.members]


QUIET = (200, (), [])


async def test_watch_resumes_from_the_last_version(keys, tmp_path):
    bookmark = {"kind": "Pod", "metadata": {"resourceVersion": "9"}}
    events = [event("ADDED", pod("b", "7")), event("BOOKMARK", bookmark)]
    api = Api(keys, tmp_path, listing("5", pod("a", "3")), (200, (), events), QUIET)
    async with api.running():
        await api.until(lambda: len(api.asked) == 3)
        assert [query.get("resourceVersion") for query in api.asked] == [None, "5", "9"]
        assert [names(roster) for roster in api.told] == [["a"], ["a", "b"]]


async def test_irrelevant_event_is_not_published(keys, tmp_path):
    other = pod("a", "6")
    other["metadata"] = {**other["metadata"], "annotations": {"seen": "yes"}}
    api = Api(keys, tmp_path, listing("5", pod("a", "3")), (200, (), [event("MODIFIED", other)]), QUIET)
    async with api.running():
        await api.until(lambda: len(api.asked) == 3)
        assert api.asked[2]["resourceVersion"] == "6"
        assert len(api.told) == 1


async def test_retry_after_is_respected(keys, tmp_path):
    busy = (429, ("retry-after: 1",), [b"Too many requests, please try again later.\n"])
    api = Api(keys, tmp_path, busy, listing("5", pod("a", "3")), QUIET)
    began = asyncio.get_running_loop().time()
    async with api.running():
        await api.until(lambda: api.told)
        assert asyncio.get_running_loop().time() - began >= 1.0
        assert api.errors("throttled") == 1


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
async def test_broken_watch_is_resumed_without_dropping_members(keys, tmp_path, broken, reason):
    news = (200, (), [event("ADDED", pod("b", "8"))])
    api = Api(keys, tmp_path, listing("5", pod("a", "3")), broken, news, QUIET)
    async with api.running():
        await api.until(lambda: len(api.told) == 2)
        assert [names(roster) for roster in api.told] == [["a"], ["a", "b"]]
        assert api.asked[2]["resourceVersion"] == "5"
        assert api.errors(reason) == 1


@pytest.mark.parametrize("how", ["event", "status"])
async def test_expired_version_relists_and_drops_removed_pods(keys, tmp_path, how):
    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version: 5 (99)"}
    gone = (200, (), [event("ERROR", status)]) if how == "event" else (410, (), [json.dumps(status).encode()])
    api = Api(keys, tmp_path, listing("5", pod("a", "3")), gone, listing("100", pod("b", "98")), QUIET)
    async with api.running():
        await api.until(lambda: len(api.told) == 2)
        assert [names(roster) for roster in api.told] == [["a"], ["b"]]
        assert api.asked[2].get("resourceVersion") is None
        assert api.errors("expired") == 1


async def test_invalid_list_is_requested_again(keys, tmp_path):
    api = Api(keys, tmp_path, (200, (), [b"<html>"]), listing("5", pod("a", "3")), QUIET)
    async with api.running():
        await api.until(lambda: api.told)
        assert api.errors("broken") == 1


async def test_immediately_ending_watch_backs_off(keys, tmp_path, monkeypatch):
    monkeypatch.setattr(list_watch, "STEADY_SECONDS", 60.0)  # on a busy machine, "at once" may take a second
    ended = (200, (), [event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "6"}})])
    api = Api(keys, tmp_path, listing("5"), ended)
    async with api.running():
        await api.until(lambda: len(api.asked) >= 2)  # the list and a watch
        began = asyncio.get_running_loop().time()
        await api.until(lambda: len(api.asked) >= 5)
        # Three pauses, the first of which is half of the shortest backoff at least, and each the double of the last.
        assert asyncio.get_running_loop().time() - began >= list_watch.FIRST_BACKOFF / 2 * (1 + 2 + 4) - 0.01


async def test_the_token_is_read_for_every_request(keys, tmp_path):
    api = Api(keys, tmp_path, listing("5", pod("a", "3")), (500, (), [b"x"]), (500, (), [b"x"]), QUIET)
    async with api.running():
        await api.until(lambda: len(api.tokens) == 2)
        (tmp_path / "token").write_text("two\n")
        await api.until(lambda: len(api.tokens) == 4)
        assert (api.tokens[0], api.tokens[-1]) == ("one", "two")
