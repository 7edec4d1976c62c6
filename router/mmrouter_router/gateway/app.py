"""The process ``mmrouter gateway``: its ports, its table of routes, and its end without a lost request."""

import asyncio
import logging
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import uvloop

from mmrouter_lib import __version__
from mmrouter_lib.tls_context import CertificateError, EngineTrust
from mmrouter_router.api import client_port, metrics_port
from mmrouter_router.core.worker_threads import WorkerThreads, switch_threads_often
from mmrouter_router.gateway import config
from mmrouter_router.gateway.discovery import Update
from mmrouter_router.gateway.forwarding import Forwarding
from mmrouter_router.gateway.metrics import GatewayMetrics
from mmrouter_router.gateway.model_routes import Deployment, Routes
from mmrouter_router.gateway.requested_model import PATHS
from mmrouter_router.http.certificate import ServerCertificate
from mmrouter_router.http.server import ADMIN_DRAIN_SECONDS, STEP_SECONDS, Server, Shutdown, raise_open_files, serve
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.intake.api_key_auth import Tenants

log = logging.getLogger("mmrouter.gateway")

MIB: Final = 1 << 20
NO_FOLDER: Final = Path(os.devnull, "api-keys")  # that nothing can create

Discover = Callable[[Update, GatewayMetrics], Awaitable[None]]
"""Runs until cancelled, and calls back with the deployments now and after every change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySettings:
    """Configuration of a gateway process.

    ``notice_seconds``: how long it serves on after SIGTERM, not Ready, so that clients learn to go elsewhere.
    ``drain_seconds``: how long answers may take afterwards.
    """

    host: str
    port: int = 8080
    metrics_port: int = 9090
    config: Path | None = None  # file of aliases
    api_keys: Path | None = None  # folder with one file of keys per tenant
    tls: Path | None = None  # folder with tls.crt and tls.key
    ca: Path | None = None  # folder with ca.crt, for deployments that serve TLS
    max_request_bytes: int = 64 * MIB
    max_held_bytes: int = 256 * MIB
    notice_seconds: float = 5.0
    drain_seconds: float = 300.0


class Gateway:
    """One gateway."""

    def __init__(self, settings: GatewaySettings, discover: Discover) -> None:
        """Raises :class:`.config.ConfigError` and ``CertificateError`` for files that cannot be used."""
        self.settings, self._discover = settings, discover
        self.metrics = GatewayMetrics()
        self.shutdown = Shutdown()
        self._stamp = config.stamp(settings.config) if settings.config is not None else None
        self._aliases: config.Aliases = config.load(settings.config) if settings.config is not None else {}
        self._deployments: tuple[Deployment, ...] | None = None
        self.routes = Routes((), self._aliases)
        self._problems: list[str] = []
        self._threads = WorkerThreads()
        count = self._count_tls
        # Without a name of its own, so that each deployment is verified by its host.
        self._trust = None if settings.ca is None else EngineTrust(settings.ca, "", count)
        self._certificate = None if settings.tls is None else ServerCertificate(settings.tls, count)
        self._upstream = Upstream(trust=self._trust)
        keys = settings.api_keys
        self.forwarding = Forwarding(
            lambda: self.routes,
            self._upstream,
            # Its salts are of no use here: the deployments' frontends have their own.
            Tenants(keys or NO_FOLDER, bytes(32), required=keys is not None),
            self.metrics,
            self._threads,
            max_request_bytes=settings.max_request_bytes,
            max_held_bytes=settings.max_held_bytes,
            trusts=self._trust is not None,
        )
        self.metrics.held_bytes.set_function(lambda: self.forwarding.budget.used)

    @property
    def ready(self) -> bool:
        """Whether the deployments are known; false while draining."""
        return self._deployments is not None and not self.shutdown.draining

    async def run(self) -> None:
        """Serve until a signal ends it."""
        settings = self.settings
        clients = Server(
            self.app(),
            settings.host,
            settings.port,
            drain_seconds=settings.drain_seconds,
            max_connections=raise_open_files(),
            count=lambda outcome: self.metrics.refused.labels(f"connection_{outcome}").inc(),
            certificate=self._certificate,
            count_slow=lambda part: self.metrics.refused.labels(f"slow_{part}").inc(),
        )
        metrics = metrics_port.metrics_app(self.metrics.registry, lambda: self.ready)
        others = [Server(metrics, settings.host, settings.metrics_port, drain_seconds=ADMIN_DRAIN_SECONDS)]
        loops: list[Awaitable[None]] = [self._discover(self.use_deployments, self.metrics)]
        if settings.config is not None:
            refused = self.metrics.config_refused.set
            loops.append(config.follow(settings.config, self.use_aliases, refused, self._stamp))
        if settings.api_keys is not None:
            loops.append(self.forwarding.tenants.follow())
        loops += [watched.watch() for watched in (self._trust, self._certificate) if watched is not None]
        try:
            # An unexpected exception ends the process instead of silently ending one of these.
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(_awaited(loop)) for loop in (*loops, self._announce(clients))]
                await serve(clients, others, self.shutdown, notice_seconds=settings.notice_seconds)
                for task in running:
                    task.cancel()
        finally:
            self._upstream.close()
            self._threads.close()

    async def _announce(self, clients: Server) -> None:
        while True:
            await asyncio.sleep(STEP_SECONDS)
            if clients.started and self.ready:
                break
        scheme = "http" if self._certificate is None else "https"
        log.info("ready %s://%s:%d/v1", scheme, self.settings.host, self.settings.port)

    def app(self) -> Any:
        """Return the application of the port for clients."""
        about = client_port.About(self._models, lambda: {"mmrouter": __version__}, lambda: bool(self.routes.names))
        return client_port.client_app(
            self.forwarding,
            PATHS,
            lambda path, code: self.metrics.requests.labels("", code).inc(),
            self.shutdown,
            lambda: self.ready,
            about,
        )

    def use_deployments(self, deployments: tuple[Deployment, ...]) -> None:
        self._deployments = deployments
        self._upstream.encrypted = frozenset(deployment.host for deployment in deployments if deployment.tls)
        self.metrics.deployments.set(len(deployments))
        self._update()

    def use_aliases(self, aliases: config.Aliases) -> None:
        self._aliases = aliases
        self._update()

    def _update(self) -> None:
        names = self.routes.names
        self.routes = Routes(self._deployments or (), self._aliases)
        if self.routes.names != names:
            log.info("serves %s", ", ".join(self.routes.names) or "no model")
        if self._deployments is not None and self.routes.problems != self._problems:
            self._problems = self.routes.problems
            for problem in self._problems:
                log.warning("%s", problem)
        self.metrics.problems.set(len(self._problems))

    def _models(self) -> list[dict[str, Any]]:
        return self.routes.models()

    def _count_tls(self, event: str) -> None:
        self.metrics.tls.labels(event).inc()


async def _awaited(loop: Awaitable[None]) -> None:
    await loop


def main(settings: GatewaySettings, discover: Discover) -> int:
    """Run a gateway until a signal ends it. Returns the exit status."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)

    async def run() -> None:
        gateway = Gateway(settings, discover)
        switch_threads_often()
        await gateway.run()

    try:
        uvloop.run(run())
    except config.ConfigError as error:
        sys.stderr.write(f"mmrouter gateway: {error}\n")
        return 2
    except CertificateError as error:
        sys.stderr.write(f"mmrouter gateway: certificate: {error}\n")
        return 2
    return 0
