"""The operator process: watches and leader election in every replica, workers in the leader only."""

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import mmrouter_lib as mmrouter
from mmrouter_operator.cluster.cache import WatchCache
from mmrouter_operator.cluster.client import ApiError, KubernetesCluster
from mmrouter_operator.cluster.custom_resource_watch import Comparison, ResourceWatch
from mmrouter_operator.cluster.frontend_stream_reader import FrontendStreams
from mmrouter_operator.cluster.lease import LeaderElection, LeaseTiming
from mmrouter_operator.cluster.operator_kinds import CORE_CHILDREN, KINDS, OPTIONAL_CHILDREN
from mmrouter_operator.cluster.watches import ChildWatches
from mmrouter_operator.cluster.work_queue import Workers
from mmrouter_operator.metrics import Metrics
from mmrouter_operator.model.config import OperatorConfig
from mmrouter_operator.model.kinds import RESOURCE, Capabilities
from mmrouter_operator.model.snapshot import Key
from mmrouter_operator.runtime.reconciler import Reconciler

log = logging.getLogger(__name__)

REFRESH, REFRESH_UNLISTED = 120.0, 5.0
"""Seconds between reads of the APIs that the cluster serves."""
GRACE = 5.0
"""Seconds for running reconciles to finish at shutdown."""
EXIT = 30.0
"""Seconds after a failure in which the process exits in any case."""


@dataclass(frozen=True, slots=True)
class Options:
    """The command line's options."""

    identity: str
    config: OperatorConfig = field(default_factory=OperatorConfig)
    kubeconfig: Path | None = None
    namespaces: tuple[str, ...] = ()
    """Namespaces to watch; empty: all."""
    lease_namespace: str = "default"
    lease_name: str = "mmrouter-operator"
    timing: LeaseTiming = field(default_factory=LeaseTiming)
    host: str = "0.0.0.0"  # noqa: S104 - probes and scrapes come from outside the pod
    port: int = 9090
    """0: no HTTP server."""


class Operator:
    """One replica, from start to end."""

    def __init__(self, options: Options, configuration: Configuration) -> None:
        self._options = options
        self._configuration = configuration
        self._metrics = Metrics()
        self._user_agent = f"mmrouter-operator/{mmrouter.__version__} ({options.identity})"
        self._cluster = KubernetesCluster(configuration, user_agent=self._user_agent, identity=options.identity)
        self._leader = LeaderElection(
            self._cluster,
            namespace=options.lease_namespace,
            name=options.lease_name,
            identity=options.identity,
            timing=options.timing,
        )
        self._cache = WatchCache()
        self._streams = FrontendStreams(on_change=self._changed)
        self._reconciler = Reconciler(
            self._cluster.fenced(self._leader.left),
            self._cache,
            self._streams,
            config=options.config,
            metrics=self._metrics,
        )
        self._workers = Workers(self._reconciler.reconcile, self._metrics, version=self._generation)
        self._comparison: Comparison | None = None
        self._watches: ChildWatches | None = None
        self._leading = asyncio.Event()
        self._lease_lost = asyncio.Event()
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Run until a signal or a failure that retrying cannot cure. Returns the exit status."""
        server = await self._serve()
        self._handle_signals()
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(self._stop.wait())]
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
        self._reconciler.capabilities = capabilities
        namespaces = self._options.namespaces or ("",)
        comparison = self._comparison = Comparison(self._cluster, self._cache, namespaces, self._changed)
        kinds = watched_kinds(capabilities)
        watches = self._watches = ChildWatches(self._connect, self._cache, kinds, namespaces, self._changed)
        resource_watch = ResourceWatch(
            self._configuration,
            self._cache,
            comparison,
            self._options.namespaces,
            self._changed,
            identity=self._options.identity,
        )
        await resource_watch.start()
        self._handle_signals()  # kopf has installed its own

        def start(coroutine: Coroutine[Any, Any, Any]) -> None:
            tasks.append(asyncio.create_task(coroutine))

        start(resource_watch.ended())
        start(comparison.run())
        start(watches.run())
        start(self._refresh(capabilities, watches))
        start(self._lead(comparison, watches))
        start(self._leader.run(gained=self._gained, lost=self._lost))
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        # A signal and a change of the served APIs end the process regularly; all other tasks end only by failing.
        failed = [task for task in ended if task.exception() is not None]
        for task in failed:
            log.error("exiting after a failure: %s", task.exception(), exc_info=task.exception())
        if failed:
            # A process that does not watch must not stay, even if the shutdown hangs.
            asyncio.get_running_loop().call_later(EXIT, os._exit, 1)
        # In this order: end the work, release the lease, end the watch.
        await self._workers.drain(GRACE)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._leader.release()
        await self._streams.close()
        await resource_watch.stop(GRACE)
        return 1 if failed else 0

    async def _until_served(self, stopped: asyncio.Task[Any]) -> Capabilities | None:
        """Wait until the API server serves our kind; ``None`` if stopped before."""
        logged = ""
        while not stopped.done():
            try:
                capabilities = await self._cluster.capabilities()
                if capabilities.serves(KINDS[RESOURCE].api):
                    return capabilities
                problem = f"waiting for the API {KINDS[RESOURCE].api}: apply the CRD (mmrouter crd)"
            except ApiError as error:
                problem = f"waiting for the API server: {error}"
            if problem != logged:
                log.warning(problem)
                logged = problem
            await asyncio.wait([stopped], timeout=1.0)
        return None

    async def _refresh(self, seen: Capabilities, watches: ChildWatches) -> None:
        """Read the served APIs regularly. Returns when the kinds to watch change: the process then restarts."""
        while True:
            # A kind that cannot be listed may have gone since the APIs were read.
            await asyncio.sleep(REFRESH if watches.listed.is_set() else REFRESH_UNLISTED)
            try:
                now = await self._cluster.capabilities()
            except ApiError as error:
                log.warning("the served APIs could not be read: %s", error)
                continue
            if optional_kinds(now) != optional_kinds(seen):
                log.warning("restarting to watch other kinds: %s", ", ".join(optional_kinds(now)) or "no optional ones")
                return
            if now != self._reconciler.capabilities:
                self._reconciler.capabilities = now
                self._enqueue_all()

    async def _lead(self, comparison: Comparison, watches: ChildWatches) -> None:
        """Run the workers while this replica leads, once the cache is filled."""
        await comparison.filled.wait()
        await watches.listed.wait()
        log.info("the caches are filled: %d deployments", len(self._cache.deployments()))
        while True:
            await self._leading.wait()
            self._metrics.leader.set(1)
            working = asyncio.create_task(self._workers.run())
            self._enqueue_all()
            lease_lost = asyncio.create_task(self._lease_lost.wait())
            try:
                await asyncio.wait([working, lease_lost], return_when=asyncio.FIRST_COMPLETED)
                if working.done():
                    working.result()  # raises: the workers end only by failing
            finally:
                for task in (working, lease_lost):
                    task.cancel()
                await asyncio.gather(working, lease_lost, return_exceptions=True)
                self._reconciler.retire()
                self._metrics.leader.set(0)

    def _gained(self) -> None:
        self._lease_lost.clear()
        self._leading.set()

    def _lost(self) -> None:
        self._leading.clear()
        self._lease_lost.set()

    def _generation(self, key: Key) -> object:
        resource = self._cache.resource(key)
        return None if resource is None else (resource["metadata"]["uid"], resource["metadata"].get("generation"))

    def _enqueue_all(self) -> None:
        for key in self._cache.deployments():
            self._changed(key)

    def _changed(self, key: Key) -> None:
        if self._leading.is_set():
            self._workers.add(key)

    def _handle_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop.set)

    async def _serve(self) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/metrics", self._get_metrics)
        app.router.add_get("/healthz", _probe(self._unhealthy))
        app.router.add_get("/readyz", _probe(self._unready))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        if self._options.port:
            await web.TCPSite(runner, self._options.host, self._options.port).start()
        return runner

    def _unhealthy(self) -> str:
        dead = self._comparison is not None and self._comparison.watch_is_dead
        return f"the watch of {RESOURCE} misses resources" if dead else ""

    def _unready(self) -> str:
        if self._comparison is None or self._watches is None:
            return "the served APIs have not been read yet"
        if self._comparison.filled.is_set() and self._watches.listed.is_set():
            return ""
        return f"the caches are not filled: {self._comparison.trouble or self._watches.trouble}"

    def _connect(self) -> ApiClient:
        client = ApiClient(self._configuration)
        client.user_agent = self._user_agent
        return client

    async def _get_metrics(self, _: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})


def optional_kinds(capabilities: Capabilities) -> list[str]:
    return [name for name, kind in OPTIONAL_CHILDREN.items() if capabilities.serves(kind.api)]


def watched_kinds(capabilities: Capabilities) -> list[str]:
    """Return the kinds to watch besides the resource: children and pods."""
    return [*CORE_CHILDREN, *optional_kinds(capabilities), "Pod"]


def _probe(problem: Callable[[], str]) -> Callable[[web.Request], Any]:
    async def answer(_: web.Request) -> web.Response:
        sentence = problem()
        return web.Response(text=(sentence or "ok") + "\n", status=503 if sentence else 200)

    return answer
