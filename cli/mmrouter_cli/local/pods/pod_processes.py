"""One container as a supervised process: probes, restarts with backoff, and a graceful stop."""

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from mmrouter_cli.local.process import Child, Guard, spawn
from mmrouter_cli.local.run_plan import ContainerPlan, Probe

FIRST_BACKOFF = 0.2
LAST_BACKOFF = 5.0
STEADY_SECONDS = 10.0
"""Uptime after which the backoff is reset."""

VAIN_STARTS = 5
"""Number of failures before the first start-up from which the container counts as hopeless."""

_NUMBER = re.compile(r"\d+")
"""Left out when two last lines are compared: process ids and times differ between starts that fail alike."""

_ERROR = re.compile(r"\b[\w.]*[a-z](?:Error|Exception): .*")
"""An exception's line; what an engine prints after it, such as leaks that its libraries report, says less."""

STARTING_STEP = 0.1
"""Seconds between probes during a start, where the probe's own period is longer."""

MEMORY_SECONDS = 2.0
"""Interval at which the shared memory of a container with its own /dev/shm is recorded."""


class VainError(Exception):
    """A container ends repeatedly without ever being up; the message names it and its last line of output."""


def log_failure(log: Callable[[str], None]) -> Callable[["asyncio.Task[None]"], None]:
    """Return a callback that logs the exception of a task that must not end."""

    def done(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            log(f"internal error: {error!r}")

    return done


async def _execute(argv: Sequence[str], env: Mapping[str, str], folder: Path) -> str | None:
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *argv, env=env, cwd=folder, stdin=null, stdout=null, stderr=null, start_new_session=True
    )
    try:
        code = await process.wait()
    except asyncio.CancelledError:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # with what a shell has started
        await process.wait()
        raise
    return None if code == 0 else f"{argv[0]} ended with {code}"


@dataclass(slots=True)
class Container:
    """A container as a process."""

    plan: ContainerPlan
    argv: tuple[str, ...]
    env: dict[str, str]
    folder: Path
    home: Path
    ip: str
    session: aiohttp.ClientSession
    guard: Guard
    private_memory: bool
    log: Callable[[str], None]
    changed: Callable[[], None]
    child: Child | None = None
    restarts: int = 0
    failed_starts: int = 0
    """Number of failures before it was ever up."""
    failure: tuple[int, str] = (0, "")
    """Status and last line of the last of these failures, without numbers."""
    fails_alike: bool = False
    """The last two of these failures had the same status and the same last line, so that the next would too."""
    last_line: str = ""
    """Last line of its output, or the line of an exception since its start."""
    raised: bool = False
    """An exception's line came since its start."""
    came_up: bool = False
    started: asyncio.Event = field(default_factory=asyncio.Event)
    ready: bool = False
    waiting_for: str = "not started"
    stopping: bool = False
    task: "asyncio.Task[None] | None" = None

    @property
    def name(self) -> str:
        return self.plan.name

    @property
    def pid(self) -> int | None:
        return self.child.pid if self.child is not None else None

    @property
    def trouble(self) -> str:
        """How its starts fail; empty for one that was up or has not ended."""
        if not self.failed_starts:
            return ""
        times = {1: "once", 2: "twice"}.get(self.failed_starts, f"{self.failed_starts} times")
        return f"has ended {times} before it was up, its last output: {self.last_line or 'none'}"

    @property
    def hopeless(self) -> bool:
        """Whether more starts cannot help."""
        return self.fails_alike or self.failed_starts >= VAIN_STARTS

    def start(self) -> None:
        self.task = asyncio.create_task(self._supervise(), name=f"container {self.name}")
        self.task.add_done_callback(log_failure(self.log))

    async def once(self) -> None:
        """Run an init container until it succeeds."""
        backoff = FIRST_BACKOFF
        while (code := await self._run()) != 0 and not self.stopping:
            # Not compared with its last failure: an init container may wait for something by failing.
            self.failed_starts += code > 0
            self.changed()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def stop(self, grace: float) -> None:
        """Terminate the process, wait ``grace`` seconds, then kill it."""
        self.stopping = True
        if self.task is None:
            return
        if self.child is not None:
            self._record_memory(self.child, every=0)
            self.child.terminate()
        else:
            self.task.cancel()
        await asyncio.wait([self.task], timeout=grace)
        if self.child is not None:
            self.log(f"does not end within {grace:g} s: killed")
            self.child.kill()
            await asyncio.wait([self.task], timeout=grace)
        self.task.cancel()
        await asyncio.wait([self.task])

    async def _supervise(self) -> None:
        backoff = FIRST_BACKOFF
        while not self.stopping:
            began = time.monotonic()
            code = await self._run()
            if self.stopping:
                return
            if time.monotonic() - began >= STEADY_SECONDS:
                backoff = FIRST_BACKOFF
            self._count(code)
            how = f"killed by signal {-code}" if code < 0 else f"ended with status {code}"
            self.waiting_for = f"{how}, restarts in {backoff:g} s"
            self.log(self.waiting_for)
            self.changed()
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF)
            self.restarts += 1
            self.changed()

    def _count(self, code: int) -> None:
        """Count a start that failed by itself: not one that was up, nor an end by a signal, as after a failed probe.

        SGLang kills itself after an exception.
        """
        if self.came_up or not (code > 0 or (code < 0 and self.raised)):
            return
        self.failed_starts += 1
        failure = (code, _NUMBER.sub("", self.last_line))
        # Without any output there is nothing to tell two failures apart by.
        self.fails_alike = bool(self.last_line) and failure == self.failure
        self.failure = failure

    async def _run(self) -> int:
        """Start the process and wait for its end. A command that cannot be started ends with 127, as in a shell."""
        self.raised = False
        try:
            self.child = await spawn(self.argv, env=self.env, folder=self.folder, guard=self.guard, line=self._on_line)
        except OSError as error:
            self._on_line(f"cannot be started: {error}")
            return 127
        if self.stopping:  # stopped while it was starting
            self.child.terminate()
        watch = asyncio.create_task(self._watch(self.child))
        watch.add_done_callback(log_failure(self.log))
        try:
            return await self.child.wait()
        finally:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)
            self.child = None
            self.started.clear()
            self._set_ready(False, "not running")

    def _on_line(self, line: str) -> None:
        error = _ERROR.search(line)
        self.raised |= error is not None
        if error or (line.strip() and not self.raised):
            self.last_line = error[0] if error else line.strip()
        self.log(line)

    async def _watch(self, child: Child) -> None:
        startup, readiness = self.plan.startup, self.plan.readiness
        if startup is not None:
            if not await self._start_up(startup, child):
                return
            self._has_come_up()
        self.started.set()
        if readiness is None:
            self._set_ready(True, "")
            return
        self.waiting_for = "readiness probe"
        await asyncio.sleep(readiness.delay)
        failures = successes = 0
        while True:
            problem = await self._attempt(readiness)
            failures, successes = (0, successes + 1) if problem is None else (failures + 1, 0)
            if problem is None and successes >= readiness.successes:
                self._set_ready(True, "")
            elif problem is not None and (failures >= readiness.failures or not self.ready):
                self._set_ready(False, f"readiness probe: {problem}")
            self._record_memory(child)
            await asyncio.sleep(readiness.period if self.ready else min(readiness.period, STARTING_STEP))

    async def _start_up(self, probe: Probe, child: Child) -> bool:
        await asyncio.sleep(probe.delay)
        deadline = time.monotonic() + probe.failures * probe.period
        while True:
            problem = await self._attempt(probe)
            if problem is None:
                return True
            self.waiting_for = f"startup probe: {problem}"
            if time.monotonic() >= deadline:
                self.log(f"{self.waiting_for} for {probe.failures * probe.period:g} s: killed")
                child.kill()
                return False
            self._record_memory(child)
            await asyncio.sleep(min(probe.period, STARTING_STEP))

    async def _attempt(self, probe: Probe) -> str | None:
        """Try a probe once. Returns ``None`` for success, otherwise what went wrong."""
        try:
            async with asyncio.timeout(probe.timeout):
                if probe.command is not None:
                    return await _execute(probe.command, self.env, self.home)
                port = probe.port if isinstance(probe.port, int) else self.plan.ports.get(probe.port)
                if port is None:
                    return f"no port is called {probe.port}"
                host = probe.host or self.ip
                if probe.tcp:
                    _, writer = await asyncio.open_connection(host, port)
                    writer.close()
                    return None
                url = f"{probe.scheme}://{host}:{port}{probe.http_path}"
                async with self.session.get(url, headers=probe.headers, allow_redirects=False, ssl=False) as answer:
                    return None if 200 <= answer.status < 400 else f"{probe.http_path} answers {answer.status}"
        except TimeoutError:
            return f"no answer within {probe.timeout:g} s"
        except (ConnectionRefusedError, aiohttp.ClientConnectorError):
            return f"no connection to {host}:{port}"
        except (OSError, aiohttp.ClientError) as error:
            return str(error) or type(error).__name__

    def _record_memory(self, child: Child, every: float = MEMORY_SECONDS) -> None:
        if self.private_memory:
            child.record_memory(every=every)

    def _has_come_up(self) -> None:
        self.came_up, self.failed_starts, self.fails_alike = True, 0, False

    def _set_ready(self, ready: bool, waiting_for: str) -> None:
        self.waiting_for = waiting_for
        if ready and self.plan.readiness is not None:
            self._has_come_up()
        if ready != self.ready:
            self.ready = ready
            self.changed()
