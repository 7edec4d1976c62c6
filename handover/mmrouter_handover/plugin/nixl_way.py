"""Processed images across nodes: a NIXL agent on either side, the engine's reads from the renderer's memory.

A read that fails costs nothing that is not given back. One that is given up may still write to its buffer, also after
NIXL has taken its handle back (seen with UCX over tcp and a peer that stood still: all bytes came later). So such a
buffer is kept aside until NIXL says that the read has ended, and its peer is asked for nothing meanwhile: a peer that
hangs holds what it was asked for at once, and no more.
"""

import contextlib
import ctypes
import math
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from mmrouter_handover.plugin.arena import GENERATION, HEAD_BYTES, Arena, Part
from mmrouter_handover.plugin.packed_item import Plan
from mmrouter_handover.plugin.peer_backoff import Rest
from mmrouter_handover.plugin.sums import checksum
from mmrouter_handover.plugin.wire import HandOverFailed, Nixl

T = TypeVar("T")

READ_SECONDS = 3.0
POLL_SECONDS = 0.0005
MAX_PEERS = 64
UNTIL_ENDED = math.inf
"""How long a buffer is lent to a read: no time says that nothing writes to it any more."""


class NixlWay:
    """One agent and its arena, for both sides: a renderer offers from it, an engine reads into it."""

    def __init__(self, agent: Any, arena: Arena, now: Callable[[], float] = time.monotonic) -> None:
        """``agent`` is a ``nixl_agent``. Registers the arena. Raises what NIXL raises."""
        self._agent, self.arena, self._now = agent, arena, now
        # Mapped to the end of the process, so the address stays what it is.
        self._base = ctypes.addressof(ctypes.c_char.from_buffer(arena.memory))
        self._registered = agent.register_memory([(self._base, arena.memory.nbytes, 0, "")], "DRAM")
        self._metadata: bytes = agent.get_agent_metadata()
        self._peers: OrderedDict[str, bytes] = OrderedDict()
        self._rest = Rest(now)
        self._stuck: list[tuple[Any, Part, str]] = []
        self._mutex = threading.Lock()  # an agent serves one thread at a time

    def offer(self, plan: Plan, seconds: float) -> tuple[Nixl, Callable[[], bool]]:
        """Write an item; return where it lies, and what ends that. Raises :class:`HandOverFailed`."""
        part = self.arena.lease(plan.length, seconds)
        try:
            payload = self.arena.payload(part, plan.length)
            plan.write(payload)
            offered = Nixl(
                length=plan.length,
                agent=self._agent.name,
                metadata=self._metadata,
                address=self._base + part.offset,
                generation=part.generation,
                checksum=checksum(payload),
            )
        except BaseException:  # nobody would learn of what is lent
            self.arena.release(part)
            raise
        return offered, lambda: self.arena.release(part)

    def read(self, offer: Nixl, use: Callable[[memoryview], T]) -> T:
        """Read an item and return what ``use`` makes of it while it lies there. Raises :class:`HandOverFailed`."""
        self.stuck()
        part = self.arena.lease(HEAD_BYTES + offer.length, UNTIL_ENDED)
        try:
            return self._read(offer, part, use)
        finally:
            with self._mutex:
                if all(stuck is not part for _, stuck, _ in self._stuck):
                    self.arena.release(part)

    def stuck(self) -> int:
        """Return how many reads that were given up have not ended, and give the buffers of the others back."""
        with self._mutex:
            self._settle()
            return len(self._stuck)

    def _read(self, offer: Nixl, part: Part, use: Callable[[memoryview], T]) -> T:
        with self._mutex:
            self._meet(offer)
        local = self._base + part.offset + HEAD_BYTES
        deadline = self._now() + READ_SECONDS
        self._transfer(offer, part, local, offer.address, HEAD_BYTES + offer.length, deadline)
        # The lease may have ended, and its memory got another item, while it was read. Its generation is zeroed before
        # that, so one that still stands there now, after the read, stood there all the time.
        self._transfer(offer, part, local, offer.address, GENERATION.size, deadline)
        got = self.arena.payload(part, HEAD_BYTES + offer.length)
        if GENERATION.unpack_from(got)[0] != offer.generation:
            raise HandOverFailed("stale", "the lease ended")
        payload = got[HEAD_BYTES:]
        if checksum(payload) != offer.checksum:
            raise HandOverFailed("corrupt", "the item's checksum differs")
        return use(payload)

    def _meet(self, offer: Nixl) -> None:
        if any(agent == offer.agent for _, _, agent in self._stuck):
            raise HandOverFailed("failed", "an earlier read of this renderer was given up and has not ended")
        if self._rest.rests(offer.agent):
            raise HandOverFailed("failed", "the renderer's agent was not reached, and is not asked again yet")
        if self._peers.get(offer.agent) == offer.metadata:
            self._peers.move_to_end(offer.agent)
            return
        self._leave(offer.agent)
        try:
            name = self._agent.add_remote_agent(offer.metadata)
        except Exception as error:  # whatever NIXL raises: its errors have no common class
            self._rest.failed(offer.agent)
            raise HandOverFailed("failed", f"the renderer's agent is not met: {error}") from error
        met = name.decode() if isinstance(name, bytes) else name
        self._peers[offer.agent] = offer.metadata
        if met != offer.agent:
            self._leave(offer.agent)
            raise HandOverFailed("refused", "the offer names another agent than its metadata")
        while len(self._peers) > MAX_PEERS:
            self._leave(next(iter(self._peers)))

    def _leave(self, name: str) -> None:
        if self._peers.pop(name, None) is not None:
            with contextlib.suppress(Exception):  # it may be gone, which is what we want
                self._agent.remove_remote_agent(name)

    def _transfer(self, offer: Nixl, part: Part, local: int, remote: int, length: int, deadline: float) -> None:
        handle, begun, state = None, False, "not begun"
        try:
            with self._mutex:
                here = self._agent.get_xfer_descs([(local, length, 0)], "DRAM")
                there = self._agent.get_xfer_descs([(remote, length, 0)], "DRAM")
                handle = self._agent.initialize_xfer("READ", here, there, offer.agent)
                begun = True  # what fails before says nothing of the peer
                state = self._agent.transfer(handle)
            while state == "PROC" and self._now() < deadline:
                time.sleep(POLL_SECONDS)
                with self._mutex:
                    state = self._agent.check_xfer_state(handle)
        except Exception as error:  # whatever NIXL raises
            state = str(error)[:200]
        finally:
            with self._mutex:
                if state == "PROC":
                    self._stuck.append((handle, part, offer.agent))
                else:
                    self._end(handle, offer.agent, worked=state == "DONE" or not begun)
        if state == "PROC":
            raise HandOverFailed("failed", f"nothing came in {READ_SECONDS:g} s")
        if state != "DONE":
            raise HandOverFailed("failed", f"the read ended as {state}")

    def _end(self, handle: Any, agent: str, *, worked: bool) -> None:
        """Forget a read that has ended, and the agent that it failed with: after a rest it is met anew."""
        if handle is not None:
            with contextlib.suppress(Exception):  # it has ended; NIXL frees it with the agent
                self._agent.release_xfer_handle(handle)
        if worked:
            self._rest.worked(agent)
        else:
            self._rest.failed(agent)
            self._leave(agent)

    def _settle(self) -> None:
        still = []
        for handle, part, agent in self._stuck:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception as error:  # a read that failed is told by an exception, too
                state = str(error)
            if state == "PROC":
                still.append((handle, part, agent))
            else:
                self._end(handle, agent, worked=state == "DONE")
                self.arena.release(part)
        self._stuck = still


def open_nixl(role: str, limit_bytes: int) -> tuple[NixlWay | None, str]:
    """Return the way, or ``None`` and why this image or machine has none."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config  # noqa: PLC0415
    except Exception as error:  # the package may be there and its libraries not
        return None, f"absent: NIXL cannot be loaded: {str(error)[:200]}"
    try:
        # The one who is read from has to take part where the network does not read by itself: its own thread does.
        config = nixl_agent_config(enable_prog_thread=True, backends=["UCX"])
        agent = nixl_agent(f"mmrouter-{role}-{os.getpid()}-{secrets.token_hex(8)}", config)
        return NixlWay(agent, Arena(limit_bytes, time.monotonic)), ""
    except Exception as error:  # whatever NIXL raises: without it the other ways are open
        return None, f"absent: NIXL has no way out: {str(error)[:200]}"
