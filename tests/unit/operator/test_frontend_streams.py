"""Following frontends: real control apps on loopback; broken ones where a router would never be so."""

import asyncio
import itertools
import os
from contextlib import aclosing, asynccontextmanager

import pytest
from unit.router.frontend import PORT, Frontend
from waiting import until

from mmrouter_operator.cluster.frontend_stream_reader import FrontendStreams
from mmrouter_operator.model.snapshot import FrontendReport, SharedReport, WorkerReport
from mmrouter_router.api.live_view import Cursor

KEY = ("default", "demo")
_hosts = itertools.count(1)


class Operator:
    """Streams whose changes are counted."""

    def __init__(self, **options) -> None:
        self.changes: list[tuple[str, str]] = []
        self.streams = FrontendStreams(self.changes.append, last_backoff=0.3, **options)
        self.aclose = self.streams.close

    async def follow(self, ip: str, token: str = "t") -> None:
        """Follow one frontend, and wait for its report."""
        self.streams.follow(KEY, {"f1": ip}, token)
        await until(self.report)

    def report(self, uid: str = "f1") -> FrontendReport | None:
        return self.streams.reports(KEY)[uid]


def operator(**options):
    return aclosing(Operator(**options))


@asynccontextmanager
async def frontend(**options):
    made = await Frontend(**options).start()
    try:
        yield made
    finally:
        await made.stop()


@asynccontextmanager
async def speaking(answer: bytes, pause: float = 0.0):
    """A server that answers every connection and ends it after a pause; yields its address and requests."""
    ip, seen = f"127.82.{os.getpid() % 250}.{next(_hosts)}", []

    async def connected(reader, writer) -> None:
        seen.append((await reader.readuntil(b"\r\n\r\n")).decode())
        writer.write(answer)
        await asyncio.sleep(pause)
        writer.close()

    server = await asyncio.start_server(connected, ip, PORT)
    try:
        yield ip, seen
    finally:
        server.close()


def head(status: int = 200, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} X", "content-type: text/event-stream", "connection: close"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


EVENT = b'data: {"router":"r","ready":true,"workers":{}}\n\n'


async def test_a_routers_report_arrives_whole_and_typed():
    async with frontend() as router, operator() as op:
        router.worker("a")
        router.worker("b", canary="")
        router.degraded = ("no_prefill",)
        router.counts.update(decisions=1, exact_decisions=1, prompt_blocks=7, hit_blocks=3)
        op.streams.follow(KEY, {"f1": router.ip}, "t")
        assert op.streams.reports(KEY) == {"f1": None}
        await until(op.report)
        report = op.report()
        assert (report.router, report.ready) == ("r", True)
        assert report.workers["uid-a"] == WorkerReport("worker", True, "True")
        assert report.workers["uid-b"].verified == "Unknown"
        assert report.workers["uid-b"].cause == "pending"
        assert (report.decisions, report.exact_decisions, report.prompt_blocks, report.hit_blocks) == (1, 1, 7, 3)
        assert report.degraded == ("no_prefill",)
        assert op.changes == [KEY]


async def test_a_change_is_reported_once_and_a_heartbeat_never():
    async with frontend() as router, operator() as op:
        worker = router.worker("a", canary="")
        await op.follow(router.ip)
        for _ in range(10):
            router.beat(worker, canary="")
            await asyncio.sleep(0.02)
        assert op.changes == [KEY]
        router.beat(worker, canary="True")
        await until(lambda: len(op.changes) == 2)
        assert op.report().workers["uid-a"].verified == "True"


async def test_following_the_same_again_makes_no_new_connection():
    async with frontend() as router, operator() as op:
        await op.follow(router.ip)
        for _ in range(5):
            op.streams.follow(KEY, {"f1": router.ip}, "t")
            await asyncio.sleep(0.01)
        assert router.connections == 1
        assert op.report() is not None


async def test_a_wrong_token_gives_no_report_and_a_new_one_is_used_at_once():
    async with frontend(token="right") as router, operator() as op:
        op.streams.follow(KEY, {"f1": router.ip}, "wrong")
        await asyncio.sleep(0.3)
        assert op.report() is None
        await op.follow(router.ip, "right")


async def test_a_frontend_that_restarts_keeps_its_report_and_equal_news_are_no_change():
    async with operator() as op:
        async with frontend() as router:
            await op.follow(router.ip)
        assert op.report() is not None
        async with frontend(ip=router.ip) as successor:
            await until(lambda: successor.connections)
            successor.worker("a")
            await until(lambda: op.report().workers)
        assert len(op.changes) == 2


async def test_a_frontend_that_stays_away_has_no_report_after_a_while():
    async with operator(hold_seconds=0.3) as op:
        async with frontend() as router:
            await op.follow(router.ip)
        await until(lambda: op.report() is None)
        assert op.changes == [KEY, KEY]


async def test_what_is_forgotten_is_disconnected_and_heard_no_more():
    async with frontend() as router, operator() as op:
        await op.follow(router.ip)
        op.streams.forget(KEY)
        assert op.streams.reports(KEY) == {}
        await until(lambda: router.connections == 0)
        router.worker("a")
        await asyncio.sleep(0.5)
        assert op.changes == [KEY]


async def test_every_frontend_has_its_own_report_and_one_that_left_the_list_is_disconnected():
    async with frontend() as one, frontend() as two, operator() as op:
        one.worker("a")
        op.streams.follow(KEY, {"f1": one.ip, "f2": two.ip}, "t")
        await until(lambda: all(op.streams.reports(KEY).values()))
        assert [len(op.report(uid).workers) for uid in ("f1", "f2")] == [1, 0]
        op.streams.follow(KEY, {"f2": two.ip}, "t")
        assert set(op.streams.reports(KEY)) == {"f2"}
        await until(lambda: one.connections == 0)
        assert two.connections == 1


async def test_a_connection_that_says_nothing_is_made_anew():
    async with speaking(head() + EVENT, pause=30) as (ip, seen), operator(silent_seconds=0.2) as op:
        op.streams.follow(KEY, {"f1": ip}, "t")
        await until(lambda: len(seen) >= 3)
        assert op.changes == [KEY]


@pytest.mark.parametrize(
    "sent",
    [
        head() + b"data: no json\n\n",
        head() + b'data: {"router":1}\n\n',
        head() + b"data: " + b"x" * (5 << 20),
        head(500) + EVENT,
        b"no http at all\r\n\r\n",
        head()[:20],
    ],
    ids=["no json", "another shape", "too long", "an error", "no http", "half a head"],
)
async def test_what_is_no_report_is_no_report_and_the_attempts_go_on(sent):
    async with speaking(sent) as (ip, seen), operator() as op:
        op.streams.follow(KEY, {"f1": ip}, "t")
        await until(lambda: len(seen) >= 3)
        assert (op.report(), op.changes) == (None, [])


async def test_a_listener_that_fails_leaves_no_frontend_deaf(caplog):
    changes = []

    def listener(key) -> None:
        changes.append(key)
        if len(changes) == 1:
            raise RuntimeError("a fault of ours")

    async with frontend() as router:
        streams = FrontendStreams(listener, last_backoff=0.3)
        streams.follow(KEY, {"f1": router.ip}, "t")
        await until(lambda: changes)
        router.worker("a")
        await until(lambda: (report := streams.reports(KEY)["f1"]) and report.workers and len(changes) >= 2)
        await streams.close()
    assert "a fault of ours" in caplog.text


async def test_the_token_does_not_follow_a_redirect():
    async with (
        speaking(head() + EVENT) as (elsewhere, asked),
        speaking(head(307, location=f"http://{elsewhere}:{PORT}/control/stream")) as (ip, seen),
        operator() as op,
    ):
        op.streams.follow(KEY, {"f1": ip}, "secret")
        await until(lambda: len(seen) >= 2)
        assert "Bearer secret" in seen[0]
        assert asked == []


def phase(router: Frontend) -> str | None:
    """What the page of a frontend shows as the deployment's phase."""
    return router.live.rollout(Cursor()).get("phase")


async def test_every_frontend_has_the_newest_status_also_one_that_comes_later_or_restarts():
    async with frontend() as one, operator() as op:
        async with frontend() as two:
            op.streams.publish(KEY, {"phase": "unfollowed"})
            await op.follow(one.ip)
            op.streams.publish(KEY, {"phase": "Starting"})
            await until(lambda: phase(one) == "Starting")
            op.streams.publish(KEY, {"phase": "Ready"})
            op.streams.follow(KEY, {"f1": one.ip, "f2": two.ip}, "t")
            await until(lambda: phase(one) == phase(two) == "Ready")
        async with frontend(ip=two.ip) as again:
            await until(lambda: phase(again) == "Ready")


async def test_an_equal_status_is_not_sent_again():
    async with speaking(head() + EVENT, pause=30) as (ip, seen), operator() as op:
        await op.follow(ip)
        for name, requests in (("Ready", 2), ("Ready", 2), ("Degraded", 3)):
            op.streams.publish(KEY, {"phase": name})
            for _ in range(10):
                await asyncio.sleep(0)  # turns of the loop, in which a request would begin
            await until(lambda requests=requests: len(seen) >= requests)
        lengths = [len(f'{{"phase":"{name}"}}') for name in ("Ready", "Degraded")]
        assert [int(request.lower().split("content-length: ")[1].split()[0]) for request in seen[1:]] == lengths


async def test_what_a_sidecar_says_of_its_nodes_memory_arrives_typed_and_an_older_release_may_leave_it_out():
    workers = b'{"a":{"uid":"a","pool":"p","role":"worker","shared":{"above":true,"limit":5}},"b":%s}'
    row = b'{"uid":"b","pool":"p","role":"worker"}'
    sent = b": comment\n\n" + EVENT.replace(b"{}", workers % row)
    async with speaking(head() + sent) as (ip, _), operator() as op:
        await op.follow(ip)
        assert op.report().degraded is None
        assert op.report().workers["a"].shared == SharedReport(above=True, limit=5)
        assert op.report().workers["b"].shared is None
