"""A deployment whose engines, on loopback addresses, answer, hang or die as a test scripts them."""

import asyncio
from array import array

from unit.router.rig import LoopbackEngine, cancelled, fingerprint, resource, synced
from unit.router.rig import http_answer as answer
from waiting import until

from mmrouter_lib.block_keys import block_keys
from mmrouter_router.dispatch.engine_client import EngineClient
from mmrouter_router.dispatch.forwarder import Forwarder
from mmrouter_router.dispatch.stages import ForwardCall, Stages
from mmrouter_router.fleet.workers import Fleet, Member
from mmrouter_router.http.upstream import Upstream
from mmrouter_router.request.prepared import Outgoing, Prepared
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.telemetry.metrics import Metrics

BLOCK, SEED = 16, 1
IDS = array("Q", range(80))
NAMED = fingerprint()
KEYS = block_keys(IDS, BLOCK, (), SEED)
PAIR, ROLES = ("prefill", "decode"), {"p": "prefill", "d": "decode", "w": "worker"}
SGLANG = {"type": "sglang", "image": "i", "blockSize": BLOCK, "kvConnector": {"transferBackend": "nixl"}}
ROOM = "x-override-bootstrap-room"

OK = answer(200, b"ok")
WRONG = answer(400, b'{"object":"error","message":"The prompt is empty.","code":400}')
STREAMED = answer(200, b'data: {"error": {"message": "KVTransferError", "code": 500}}\n\n')
HANGS, DIES, MEETS = b"hangs", b"dies", b"meets"
SOON = 0.4  # timeout of a hanging engine; a healthy one answers within it on a busy machine, too


class Engine(LoopbackEngine):
    """Answers each request with the bytes ``says``. ``left``: requests that were aborted before the answer.

    ``HANGS``: never answers. ``DIES``: closes the connection after the bytes that follow this word.
    ``MEETS``: answers once the other engine of the bootstrap room has answered. ``rooms``: those in which one has.
    """

    def __init__(self, says: bytes, rooms: set[str]) -> None:
        super().__init__()
        self.says, self.rooms = says, rooms
        self.left = 0
        self.asked = self.requests

    async def aborted(self) -> None:
        await until(lambda: self.left)

    async def respond(self, reader, writer, headers) -> bool:
        if self.says.startswith(DIES):
            writer.write(self.says.removeprefix(DIES))
            await writer.drain()
            writer.transport.abort()
            return False
        if self.says in (HANGS, MEETS) and await self._left(reader, headers[ROOM]):
            self.left += 1
            writer.close()
            return False
        if self.says.startswith(b"HTTP/1.1 200") and self.says != STREAMED:
            self.rooms.add(headers.get(ROOM, ""))
        writer.write(OK if self.says == MEETS else self.says)
        return True

    async def _left(self, reader, room: str) -> bool:
        """Wait for the partner or the end of the request; return whether it was the latter."""
        reading = asyncio.ensure_future(reader.read(1))
        while not reading.done() and (self.says == HANGS or room not in self.rooms):
            await asyncio.wait((reading,), timeout=0.005)
        if not reading.done():
            await cancelled(reading)
            return False
        return True


class Rig:
    """A deployment, by default with a prefill and a decode pool of SGLang; round robin takes engines by their names."""

    def __init__(
        self, policy: str = "roundRobin", prefill_seconds: float = 60, roles=PAIR, engine=SGLANG, **spec
    ) -> None:
        self.metrics, self.engines = Metrics(), {}
        self.rooms: set[str] = set()
        self.fleet = Fleet(self.metrics)
        self.upstream = Upstream(connect_seconds=10)
        pools = [{"name": role, "role": role, "replicas": 2, "accelerator": {"kind": "cpu"}} for role in roles]
        self.type = engine["type"]
        spec |= {"engine": engine, "routing": {"policy": policy}, "pools": pools}
        self.placer = Placer(resource(**spec), self.fleet)
        self.stages = Stages(self.type, roles, self.fleet, self.placer, self.metrics, None)
        exchange, options = EngineClient(self.upstream, self.type, "secret"), {"prefill_seconds": prefill_seconds}
        self.forwarder = Forwarder(self.placer, exchange, self.metrics, self.stages, **options)

    async def engine(self, name: str, says: bytes | None = OK, *, keys=(), ranks=1, proved=None, **member) -> Engine:
        """``p1`` prefills and is ``proved``, ``d1`` decodes and is not; one that says ``None`` is not there."""
        engine = self.engines[name] = Engine(says or b"", self.rooms)
        if says is not None:
            await engine.serve()
        role = ROLES[name[0]]
        canary = "True" if (role != "decode" if proved is None else proved) else ""
        synced(self.fleet, Member(name, name, engine.ip, role, role, **member), keys, canary, ranks, engine=self.type)
        return engine

    async def serve(self, **says: bytes | None) -> list[Engine]:
        """Add engines by name, with what each says."""
        return [await self.engine(name, each) for name, each in says.items()]

    async def send(self, fields=(), path: str = "/v1/chat/completions", named=NAMED):
        prepared = Prepared(None, None, (), IDS, (), "exact", (), SEED, 1)
        call = ForwardCall("r-1", prepared, Outgoing(path, dict(fields)), {}, named)
        async with asyncio.timeout(15):
            return await self.forwarder.send(call)

    def close(self) -> None:
        self.upstream.close()
        for engine in self.engines.values():
            engine.close()

    async def nothing_is_booked(self) -> None:
        usages = [usage for worker in self.fleet for usage in worker.usage.values()]
        await until(lambda: not any(usage.requests or usage.prefill or usage.active for usage in usages))
