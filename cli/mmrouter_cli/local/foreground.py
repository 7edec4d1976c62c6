"""`mmrouter up` in the foreground: start a deployment, show its readiness, run until a signal or the demo's end."""

import asyncio
import contextlib
import json
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from mmrouter_cli import demo_workload
from mmrouter_cli.demo_workload import DemoResult
from mmrouter_cli.local.cluster import LocalCluster, run_local
from mmrouter_cli.local.devices import device_requests, find_devices
from mmrouter_cli.local.envoy import find_envoy
from mmrouter_cli.local.pods.container_process import Engines
from mmrouter_cli.local.pods.pod_processes import VainError
from mmrouter_cli.local.preflight import Preflight
from mmrouter_cli.local.process import console_sink, file_sink
from mmrouter_cli.local.run_plan import make_plan
from mmrouter_cli.options import table
from mmrouter_cli.status.control_api import ControlEndpoint, Frontend, Unread, client, fetch
from mmrouter_cli.verify import NOT_PROBED
from mmrouter_lib.api import MMRouterDeployment, SpecError, parse_deployment
from mmrouter_operator.model.credentials import new_secret_data
from mmrouter_operator.render import render


def behind_gateway(deployment: MMRouterDeployment) -> MMRouterDeployment:
    """Return the deployment with a picker: of engines where a gateway can reach them all alike, else of frontends.

    Raises ``SpecError`` for one that no gateway can serve, and ``LocalError`` without Envoy.
    """
    find_envoy()
    if deployment.spec.frontend.has_picker:
        return deployment
    resource = deployment.model_dump(mode="json", by_alias=True, exclude_unset=True)
    frontend = resource["spec"].setdefault("frontend", {})
    frontend["mode"] = "endpointPicker"
    with contextlib.suppress(SpecError):
        return parse_deployment(resource)
    frontend["mode"] = "frontendPicker"
    return parse_deployment(resource)


async def run(
    deployment: MMRouterDeployment,
    *,
    base_dir: Path,
    engines: Engines,
    engine_env: Path | None,
    objects: list[dict[str, Any]],
    demo: bool,
    wait_seconds: float,
    console: Console,
    gateway: bool = False,
    verbose: bool = False,
) -> DemoResult | None:
    """Run a deployment until ctrl-C, or until the demo is over; return the demo's result.

    ``engines``: simulated ones, or real ones from ``engine_env`` (else PATH). ``objects``: ConfigMaps and Secrets that
    the deployment refers to. ``gateway``: with Envoy in front of the routers. ``verbose``: the pods' output on standard
    error, else in a temporary file. When this returns or raises, no process and no file of the deployment is left, but
    the log of a run that failed. Raises :class:`NotReadyError`, ``ProbeError``, ``LocalError`` or
    ``mmrouter_lib.api.SpecError``.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    rendered = [*objects, *render(deployment, secrets=new_secret_data())]
    preflight = Preflight(deployment, make_plan(rendered), base_dir, engines, engine_env, gateway)
    preflight.check()
    if warning := preflight.warning():
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    name = deployment.metadata.name
    async with contextlib.AsyncExitStack() as stack:
        path = None if verbose else _log_file(name, console)
        log = console_sink() if path is None else stack.enter_context(file_sink(path))
        run_with = run_local(
            rendered,
            base_dir=base_dir,
            name=name,
            model=deployment.spec.model.served_name,
            engines=engines,
            engine_env=engine_env,
            devices=device_requests(deployment, find_devices) if engines == "path" else {},
            log=log,
        )
        cluster = await stack.enter_async_context(run_with)
        ended = asyncio.create_task(stop.wait())
        if not verbose:
            # Ended before the pods are stopped.
            await stack.enter_async_context(_in_background(PodView(console).follow(cluster.waiting)))
        simulated = engines == "sim"
        working = _work(cluster, deployment, console, wait_seconds, demo=demo, gateway=gateway, simulated=simulated)
        work = asyncio.create_task(working)
        await asyncio.wait((work, ended), return_when=asyncio.FIRST_COMPLETED)
        result = None
        if work.done():
            result = work.result()
            if not demo:
                await ended
            ended.cancel()
            console.print("stopping")
        else:
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await work
    if path is not None and (result is None or result.passed):
        path.unlink(missing_ok=True)
    return result


def _log_file(name: str, console: Console) -> Path:
    """Create the file of a deployment's log, for its user only, and say where it is."""
    with tempfile.NamedTemporaryFile(prefix=f"mmrouter-{name}-", suffix=".log", delete=False) as file:
        console.print(f"log: {file.name}", markup=False, highlight=False, soft_wrap=True)
        return Path(file.name)


@contextlib.asynccontextmanager
async def _in_background(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


class PodView:
    """What pods wait for: on a terminal a table until all are ready the first time, else a line for each change."""

    def __init__(self, console: Console) -> None:
        self._console, self._shown, self._began = console, dict[str, str](), time.monotonic()

    async def follow(self, pods: Callable[[], Mapping[str, str]]) -> None:
        """Show until cancelled. ``pods``: name of a pod -> what it waits for, empty once it is ready."""
        if self._console.is_terminal:
            with Live(console=self._console, transient=True, auto_refresh=False) as live:
                while any(now := pods().values()) or not now:
                    live.update(self.table(pods()), refresh=True)
                    await asyncio.sleep(STEP_SECONDS)
            self._shown = dict(pods())
            self._print(f"{len(self._shown)} pods ready after {time.monotonic() - self._began:.0f} s")
        while True:
            self.show(pods())
            await asyncio.sleep(STEP_SECONDS)

    def table(self, pods: Mapping[str, str]) -> Table:
        head = f"{_ready(pods)} of {len(pods)} pods ready, {time.monotonic() - self._began:.0f} s"
        shown = table(head, "pod", "waits for", title_justify="left")
        for name, why in pods.items():
            shown.add_row(name, Text(why, style="yellow") if why else Text("ready", style="green"))
        return shown

    def show(self, pods: Mapping[str, str]) -> None:
        """Print what is different from the last time."""
        for name, why in pods.items():
            if self._shown.get(name) != why:
                ready = f"ready, {_ready(pods)} of {len(pods)}"
                self._print(f"{name}: waits for {why}" if why else f"{name}: {ready}")
        self._shown = dict(pods)

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _ready(pods: Mapping[str, str]) -> int:
    return sum(not why for why in pods.values())


async def _work(
    cluster: LocalCluster,
    deployment: MMRouterDeployment,
    console: Console,
    wait_seconds: float,
    *,
    demo: bool,
    gateway: bool,
    simulated: bool,
) -> DemoResult | None:
    """Wait until every worker is verified on every frontend; then run the demo if requested."""
    try:
        await cluster.wait_ready(wait_seconds)
    except (TimeoutError, VainError) as error:
        raise NotReadyError(str(error)) from error
    if gateway:
        await cluster.open_gateway(tls=deployment.spec.frontend.picker_tls != "none")
    endpoint = ControlEndpoint(cluster.endpoint, tuple(f.control for f in cluster.frontends), cluster.control_token)
    await wait_verified(endpoint, deployment, console, wait_seconds)
    console.print(f"[green]ready[/green] {cluster.endpoint}/v1")
    for line in lines_when_ready(cluster.endpoint, deployment, simulated=simulated, demo=demo):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return await asyncio.to_thread(demo_workload.run, endpoint, deployment.spec.model.served_name) if demo else None


def lines_when_ready(url: str, deployment: MMRouterDeployment, *, simulated: bool, demo: bool) -> list[str]:
    """Return whether engines are simulated and, where no demo does it, how to send a first request."""
    lines = ["SIMULATED engines: answers are made up, and nothing is computed"] if simulated else []
    return lines if demo else [*lines, *_first_request(url, deployment)]


def _first_request(url: str, deployment: MMRouterDeployment) -> list[str]:
    """Return a request by curl and in Python."""
    model, keys = deployment.spec.model.served_name, deployment.spec.frontend.api_keys is not None
    body = json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello."}]})
    options = "-H 'authorization: Bearer KEY' " if keys else ""
    options += "--insecure " if url.startswith("https:") else ""
    lines = [f"  curl {options}{url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"]
    if url.startswith("http:"):
        client = f"OpenAI(base_url='{url}/v1', api_key='{'KEY' if keys else 'any'}')"
        messages = "messages=[{'role': 'user', 'content': 'Hello.'}]"
        lines += ["  from openai import OpenAI", f"  {client}.chat.completions.create(model='{model}', {messages})"]
    return lines


STEP_SECONDS = 0.1
SETTLED = frozenset({"verified", "degraded", "refused"})
AWAITED = frozenset({"worker", "prefill", "decode", "encoder"})
"""Roles whose pods reach a final standing, or answer where they cannot be proved."""


class NotReadyError(Exception):
    """The deployment was not ready in time; the message says what is missing."""


async def wait_verified(
    endpoint: ControlEndpoint, deployment: MMRouterDeployment, console: Console, seconds: float
) -> None:
    """Wait, and print changes of workers' standing. Raises :class:`NotReadyError`."""
    wanted = sum(pool.replicas for pool in deployment.spec.pools if pool.role in AWAITED)
    shown: dict[tuple[str, str], str] = {}
    missing = "no frontend answered"
    async with client(endpoint.token) as http:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    counts = []
                    for control in endpoint.controls:
                        state = await fetch(http, Frontend(control, control))
                        workers = [] if isinstance(state, Unread) else state["workers"]
                        for worker in workers:
                            _show(console, shown, control, worker)
                        # SGLang's encoders only have to answer.
                        counts.append(sum(w["standing"] in SETTLED or w.get("cause") == NOT_PROBED for w in workers))
                        if counts[-1] < wanted:
                            missing = f"{control} sees {counts[-1]} of {wanted} workers verified"
                    if counts and min(counts) >= wanted:
                        return
                    await asyncio.sleep(STEP_SECONDS)
        except TimeoutError:
            raise NotReadyError(missing) from None


def _show(console: Console, shown: dict[tuple[str, str], str], control: str, worker: dict[str, Any]) -> None:
    line = worker["standing"]
    if worker["canary"] == "False":
        line += f" ({worker['canary_cause']}: {worker['canary_message']})"
    if shown.get(key := (control, worker["uid"])) != line:
        shown[key] = line
        console.print(f"{control.removeprefix('http://')} {worker['name']}: {line}", highlight=False, markup=False)
