"""Run one rank in real time: an asyncio loop around the pure scheduler.

The loop schedules a step, waits for its duration, completes it, publishes its events and returns its tokens, as the
engine's core process does. Durations count from the planned end of the last step, so late wake-ups do not add up.
"""

import asyncio
from collections.abc import AsyncGenerator

from mmrouter_sim.core.events import Event
from mmrouter_sim.core.request import Request
from mmrouter_sim.core.scheduler import Output, Scheduler
from mmrouter_sim.publisher import Publisher


class Aborted(Exception):  # noqa: N818 - an outcome, not an error
    """The engine aborted this request at shutdown."""


class Runner:
    """Drives one scheduler. ``publisher`` is ``None`` where KV events are off.

    ``tells_when_idle``: what happened beside a step goes out when there is no next one, not with the next one.
    """

    def __init__(self, scheduler: Scheduler, publisher: Publisher | None, *, tells_when_idle: bool = False) -> None:
        self.scheduler = scheduler
        self.publisher = publisher
        self.tells_when_idle = tells_when_idle
        self._queues: dict[Request, asyncio.Queue[Output | None]] = {}
        self._wake = asyncio.Event()
        self._quiet = asyncio.Event()
        self._quiet.set()

    @property
    def load(self) -> int:
        """Number of waiting and running requests."""
        return len(self.scheduler.waiting) + len(self.scheduler.running)

    async def generate(self, request: Request) -> AsyncGenerator[Output, None]:
        """Run a request and yield its tokens. Leaving the iteration early aborts it.

        Raises ``ValueError`` for a request that can never run here and :class:`Aborted` when the engine shuts down.
        """
        queue: asyncio.Queue[Output | None] = asyncio.Queue()
        request.arrived = asyncio.get_running_loop().time()
        self.scheduler.add(request)
        self._queues[request] = queue
        self._quiet.clear()
        self._wake.set()
        try:
            while True:
                output = await queue.get()
                if output is None:
                    raise Aborted
                yield output
                if output.finished is not None:
                    return
        finally:
            self.scheduler.abort(request)
            del self._queues[request]
            self._wake.set()
            if not self._queues:
                self._quiet.set()

    async def quiet(self) -> None:
        """Wait until there are no requests."""
        await self._quiet.wait()

    def abort_all(self) -> None:
        """Abort every request; its iteration raises :class:`Aborted`."""
        for request, queue in self._queues.items():
            if request.finished is None:
                self.scheduler.abort(request)
                queue.put_nowait(None)

    def publish_pending(self) -> None:
        """Publish events that occurred between steps, if the engine does not delay them to the next step."""
        self._wake.set()

    async def run(self) -> None:
        """Step until cancelled."""
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            step = self.scheduler.schedule(loop.time())
            if step is None:
                self._publish(self.scheduler.news() if self.tells_when_idle else [])
                self._wake.clear()
                await self._wake.wait()
                due = loop.time()
                continue
            due += step.seconds
            await asyncio.sleep(max(0.0, due - loop.time()))
            outputs, events = self.scheduler.complete(step, loop.time())
            self._publish(events)
            for output in outputs:
                self._queues[output.request].put_nowait(output)

    def _publish(self, events: list[Event]) -> None:
        if events and self.publisher is not None:
            self.publisher.publish(events)
