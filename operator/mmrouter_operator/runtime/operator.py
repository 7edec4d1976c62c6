"""The operator as a whole: what runs in every replica, and what runs only in the one that leads."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from kubernetes.aio.client.configuration import Configuration
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import mmrouter_lib as mmrouter
from mmrouter_operator.cluster import connection as connect
from mmrouter_operator.cluster import watches as handlers
from mmrouter_operator.cluster.cache import Cache
from mmrouter_operator.cluster.cache_audit import Audit
from mmrouter_operator.cluster.client import ApiError, Fenced, KubernetesCluster
from mmrouter_operator.cluster.frontend_streams import Streams
from mmrouter_operator.cluster.lease import Leader, Timing
from mmrouter_operator.cluster.watch_tasks import Watching
from mmrouter_operator.cluster.work_queue import Workers
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.capabilities import Capabilities
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.refs import KINDS, OPTIONAL_CHILDREN, RESOURCE
from mmrouter_operator.model.snapshot import Key
from mmrouter_operator.runtime.reconciler import Reconciler

log = logging.getLogger(__name__)

REFRESH = 120.0
"""Seconds between looks at which APIs the cluster serves."""
GRACE = 5.0
"""Seconds that running reconciles get to finish at the end."""
EXIT = 30.0
"""Seconds after a failure in which the process has ended, in whatever way."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    identity: str
    config: OperatorConfig = field(default_factory=OperatorConfig)
    kubeconfig: Path | None = None
    namespaces: tuple[str, ...] = ()
    """Where to look for resources; empty: everywhere."""
    lease_namespace: str = "default"
    lease_name: str = "mmrouter-operator"
    timing: Timing = field(default_factory=Timing)
    host: str = "0.0.0.0"  # noqa: S104 - probes and scrapes come from outside the pod
    port: int = 9090
    """0: none is served."""


class Operator:
    """One replica, from start to end."""

    def __init__(self, options: Options, configuration: Configuration) -> None:
        self._options = options
        self._configuration = configuration
        self._metrics = Metrics()
        self._cluster = KubernetesCluster(
            configuration,
            user_agent=f"mmrouter-operator/{mmrouter.__version__} ({options.identity})",
            identity=options.identity,
        )
        self._leader = Leader(
            self._cluster,
            namespace=options.lease_namespace,
            name=options.lease_name,
            identity=options.identity,
            timing=options.timing,
        )
        self._cache = Cache()
        self._streams = Streams(on_change=self._changed)
        self._reconciler = Reconciler(
            Fenced(self._cluster, self._leader.left),
            self._cache,
            self._streams,
            config=options.config,
            metrics=self._metrics,
        )
        self._workers = Workers(self._reconciler.reconcile, self._metrics, version=self._generation)
        self._audit: Audit | None = None
        self._leading = asyncio.Event()
        self._deposed = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal, or until something that cannot be repaired. Returns the exit status."""
        loop = asyncio.get_running_loop()
        server = await self._serve()
        tasks: list[asyncio.Task[Any]] = [self._watch_signals(loop)]
        try:
            capabilities = await self._until_served(tasks[0])
            if capabilities is None:
                return 0
            return await self._run(capabilities, tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._streams.close()
            await self._cluster.close()
            await server.cleanup()

    async def _run(self, capabilities: Capabilities, tasks: list[asyncio.Task[Any]]) -> int:
        loop = asyncio.get_running_loop()
        self._reconciler.capabilities = capabilities
        kinds = [*handlers.WATCHED, *_optional(capabilities)]
        namespaces = self._options.namespaces or ("",)
        self._audit = Audit(self._cluster, self._cache, kinds, namespaces, self._changed)
        watching = self._watching(kinds)
        await watching.start()
        # kopf took the signals for itself when it started.
        self._handle_signals(loop)

        def start(coroutine: Coroutine[Any, Any, Any]) -> None:
            tasks.append(asyncio.create_task(coroutine))

        start(watching.ended())
        start(self._audit.run())
        start(self._refresh(capabilities))
        start(self._lead())
        start(self._leader.run(gained=self._gained, lost=self._lost))
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # The signal and the APIs that changed are reasons to end; everything else ends only when it fails.
        failed = [task for task in ended if task.exception() is not None]
        for task in failed:
            log.error("ends because a part of it failed: %s", task.exception(), exc_info=task.exception())
        if failed:
            # Whatever hangs on the way out: a process that does not watch must not stay.
            asyncio.get_running_loop().call_later(EXIT, os._exit, 1)
        # In this order: nothing runs, then the lease is given back, then nobody watches.
        await self._workers.drain(GRACE)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leader.release()
        await self._streams.close()
        await watching.stop(GRACE)
        return 1 if failed else 0

    def _watching(self, kinds: list[str]) -> Watching:
        assert self._audit is not None
        registry = handlers.registry_for(
            kinds, self._cache, self._changed, self._audit, lambda: connect.credentials(self._configuration)
        )
        return Watching(
            kinds, self._options.namespaces, registry, handlers.settings_for(kinds), identity=self._options.identity
        )

    async def _until_served(self, stopped: asyncio.Task[Any]) -> Capabilities | None:
        """Wait for the API server and for our kind in it; ``None`` when told to stop before."""
        told = ""
        while not stopped.done():
            try:
                capabilities = await self._cluster.capabilities()
                if capabilities.serves(KINDS[RESOURCE].api_version):
                    return capabilities
                problem = f"waits for the API {KINDS[RESOURCE].api_version}: apply the CRD (mmrouter crd)"
            except ApiError as error:
                problem = f"waits for the API server: {error}"
            if problem != told:
                log.warning(problem)
                told = problem
            await asyncio.wait([stopped], timeout=1.0)
        return None

    async def _refresh(self, seen: Capabilities) -> None:
        """Follow which APIs are served. Ends when there are other kinds to watch, so that watches start anew."""
        while True:
            await asyncio.sleep(REFRESH)
            try:
                now = await self._cluster.capabilities()
            except ApiError as error:
                log.warning("the served APIs could not be read: %s", error)
                continue
            if _optional(now) != _optional(seen):
                log.warning("starts again, to watch other kinds: %s", ", ".join(_optional(now)) or "none besides ours")
                return
            if now != self._reconciler.capabilities:
                self._reconciler.capabilities = now
                self._enqueue_all()

    async def _lead(self) -> None:
        """Run the workers while this replica leads and knows what is there."""
        assert self._audit is not None
        await self._audit.filled.wait()
        log.info("the caches are filled: %d deployments", len(self._cache.deployments()))
        while True:
            await self._leading.wait()
            self._metrics.leading(True)
            working = asyncio.create_task(self._workers.run())
            self._enqueue_all()
            deposed = asyncio.create_task(self._deposed.wait())
            try:
                await asyncio.wait([working, deposed], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    # It never ends by itself: this raises what it failed with, and the process ends.
                    working.result()
            finally:
                for task in (working, deposed):
                    task.cancel()
                await asyncio.gather(working, deposed, return_exceptions=True)
                self._reconciler.retire()
                self._metrics.leading(False)

    def _gained(self) -> None:
        self._deposed.clear()
        self._leading.set()

    def _lost(self) -> None:
        self._leading.clear()
        self._deposed.set()

    def _generation(self, key: Key) -> object:
        resource = self._cache.resource(key)
        return None if resource is None else (resource["metadata"]["uid"], resource["metadata"].get("generation"))

    def _enqueue_all(self) -> None:
        for key in self._cache.deployments():
            self._changed(key)

    def _changed(self, key: Key) -> None:
        if self._leading.is_set():
            self._workers.add(key)

    def _watch_signals(self, loop: asyncio.AbstractEventLoop) -> asyncio.Task[Any]:
        self._handle_signals(loop)
        return asyncio.create_task(self._stop.wait())

    def _handle_signals(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", _answer(lambda: "the watches are deaf" if self._deaf() else ""))
        app.router.add_get("/readyz", _answer(self._unready))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        if self._options.port:
            await web.TCPSite(runner, self._options.host, self._options.port).start()
        return runner

    def _deaf(self) -> bool:
        return self._audit is not None and self._audit.deaf

    def _unready(self) -> str:
        if self._audit is None:
            return "the API server has not told yet what it serves"
        return "" if self._audit.filled.is_set() else f"the caches are not filled: {self._audit.trouble}"

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def _optional(capabilities: Capabilities) -> list[str]:
    return [name for name, kind in OPTIONAL_CHILDREN.items() if capabilities.serves(kind.api_version)]


def _answer(problem: Callable[[], str]) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        sentence = problem()
        return web.Response(text=(sentence or "ok") + "\n", status=503 if sentence else 200)

    return answer
