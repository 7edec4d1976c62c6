"""A router's control API on a loopback address, with workers made by tests."""

import asyncio
from array import array
from collections import Counter

from unit.router.rig import IDS, Rig, loopback, prepared, synced
from waiting import until

from mmrouter_router.api import control_port
from mmrouter_router.api.live_view import LiveView
from mmrouter_router.api.operator_report import Reporter
from mmrouter_router.encoding.encoder_pods import EncoderProbes
from mmrouter_router.explain.decisions import DecisionLog, DecisionTrace, trace_of
from mmrouter_router.fleet.workers import Member, Worker
from mmrouter_router.http.server import Server
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.renderer_client import Renderer
from mmrouter_router.telemetry.metrics import Metrics

PORT = 8001


class Reports(Rig):
    """A rig whose router reports."""

    def __init__(self, engine: str = "vllm", **verification) -> None:
        super().__init__(**verification)
        self.upstream = Upstream(connect_seconds=10)
        self.probes = EncoderProbes(self.fleet, self.upstream, engine, "secret", "m")
        self.renderer = Renderer(self.upstream, "secret", "m", Metrics())
        self.counts, self.possible, self.ready = Counter(), True, True
        self.others: list[Worker] = []  # whose engines make other prompts
        self.degraded: tuple[str, ...] = ()
        self.reporter = Reporter(
            router_id="r",
            engine=engine,
            fleet=self.fleet,
            renderer=self.renderer,
            probes=self.probes,
            counts=self.counts,
            ready=lambda: self.ready,
            possible=lambda: self.possible,
            possible_at=lambda worker: self.possible and worker not in self.others,
            degraded=lambda: self.degraded,
        )

    def row(self, worker) -> tuple:
        row = self.reporter.report()["workers"][worker.member.uid]
        return row["routable"], row["verified"], row["cause"]

    def of_role(self, role: str, name: str = "a", ip: str = "127.0.0.1", **beat):
        """Add a pod of a role with a heartbeat and a snapshot."""
        return synced(self.fleet, Member(f"uid-{name}", name, ip, "worker", role), **beat)


class Decisions:
    """The decisions of a router without clients: those that a test makes."""

    def __init__(self, kept: int) -> None:
        self.decisions = DecisionLog(kept)

    async def describe(self, trace: DecisionTrace) -> dict:
        return trace.as_json()


class Frontend(Reports):
    """The control app without requests."""

    def __init__(self, token: str = "t", ip: str = "", kept: int = 1000, **about: str) -> None:
        super().__init__()
        self.token = token
        self.ip = ip or loopback()
        self.stopping = asyncio.Event()
        self.refusals = Metrics().control_refusals
        self.chat = Decisions(kept)
        named = {"deployment": "d", "model": "m", "engine": "vllm", "policy": "kv", "version": "1"} | about
        exactness = self.metrics.decisions
        self.live = LiveView(self.reporter, self.placer, self.chat.decisions, exactness, named, lambda: 1)
        app = control_port.control_app(
            token,
            self.reporter,
            self.placer,
            None,
            self.chat,
            *[None] * 2,
            peers=tuple,
            stopping=self.stopping,
            refusals=self.refusals,
            feed_keys=list,
            live=self.live,
        )
        self.server = Server(app, self.ip, PORT, drain_seconds=1)
        self._task: asyncio.Task | None = None

    def decide(self, request_id: str, ids: array = IDS, **prompt) -> DecisionTrace:
        """Place a prompt of these tokens as a request would be, and log and count the decision."""
        made = prepared(ids=ids, **prompt)
        decision = self.placer.place(made)
        trace = trace_of(request_id, made, decision)
        self.chat.decisions.add(request_id, trace)
        self.metrics.decisions.labels(decision.exactness, "").inc()
        return trace

    async def start(self) -> "Frontend":
        self._task = asyncio.create_task(self.server.serve())
        await until(lambda: self.server.started)
        return self

    async def stop(self) -> None:
        """Stop as a router does: streams first."""
        self.stopping.set()
        self.server.should_exit = True
        if self._task is not None:
            await self._task

    @property
    def connections(self) -> int:
        return len(self.server.server_state.connections)
