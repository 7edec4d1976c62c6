"""A router's control API on a loopback address, with workers made by tests."""

import asyncio
import itertools
import os

from unit.router.test_operator_report import Reports

from mmrouter_router.api import control
from mmrouter_router.http.server import Server
from mmrouter_router.telemetry.metrics import Metrics

PORT = 8001
_hosts = itertools.count(1)


class Frontend(Reports):
    """The control app without requests and decisions."""

    def __init__(self, token: str = "t", ip: str = "") -> None:
        super().__init__()
        self.token = token
        self.ip = ip or f"127.81.{os.getpid() % 250}.{next(_hosts)}"
        self.stopping = asyncio.Event()
        self.refusals = Metrics().control_refusals
        app = control.create(
            token=token,
            router_id="r",
            fleet=self.fleet,
            placer=self.placer,
            stages=None,
            chat=None,
            sampler=None,
            renderer=self.renderer,
            prompter=None,
            peers=tuple,
            report=self.reporter.report,
            stopping=self.stopping,
            refusals=self.refusals,
        )
        self.server = Server(app, self.ip, PORT, drain_seconds=1)
        self._task: asyncio.Task | None = None

    async def start(self) -> "Frontend":
        self._task = asyncio.create_task(self.server.serve())
        while not self.server.started:
            await asyncio.sleep(0.005)
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
