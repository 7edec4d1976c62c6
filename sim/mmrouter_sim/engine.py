"""A simulated engine without its HTTP side: model, ranks, processor cache, hand-over, and draining.

What differs by engine is in ``vllm/engine.py`` and ``sglang/engine.py``.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, cast

from mmrouter_sim.core.events import Dialect
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.encoders import EncoderShares, ImageEncoder
from mmrouter_sim.media import BYTES_PER_TOKEN, RecentImages
from mmrouter_sim.metrics import EngineMetrics, Samples
from mmrouter_sim.model import AnswerGenerator, Model
from mmrouter_sim.rank_runner import Publisher, Runner
from mmrouter_sim.settings import Settings
from mmrouter_sim.sglang.pairing import PairRooms
from mmrouter_sim.vllm.plugin import Plugin
from mmrouter_sim.vllm.transfers import ConnectorTransfers, EcTransfer, serve_readers

if TYPE_CHECKING:
    from mmrouter_sim.vllm.responses import StoredResponse

_CACHE_TOKENS = 131_072  # tokens of each rank's KV cache, unless a flag sets them or the context is longer


class SimulatedEngine(ABC):
    """State shared by all requests. Raises ``ValueError`` for settings that the engine would not start with.

    ``tells_when_idle``: publish an empty batch when the last request ends. ``fingerprint``: of the processor if images
    are named by their encoded bytes, ``None`` if by their pixels.
    """

    tells_when_idle: ClassVar[bool] = False
    plugin: Plugin | None = None
    fingerprint: str | None = None

    def __init__(self, settings: Settings, model: Model) -> None:
        self.settings = settings
        self.model = model
        self.context = settings.max_model_len or model.context
        self.images = RecentImages(settings.processor_cache_bytes // BYTES_PER_TOKEN)
        self.answers = AnswerGenerator(
            model.tokenizer, model.stop_ids, seed=settings.seed, mean_tokens=settings.answer_tokens
        )
        self.handover = ConnectorTransfers(settings.handover, settings.cost)
        self.pairing = PairRooms(settings.pairs, settings.cost) if settings.pairs is not None else None
        self.encoder: ImageEncoder | None = None
        if settings.handover.encodes and settings.handover.ec is not None:
            self.encoder = ImageEncoder(settings.handover.ec, settings.cost, settings.seed)
            self.handover.embeddings = self.encoder.stored
        if settings.encodes_only:
            self.encoder = ImageEncoder(EcTransfer("ECCPUConnector", "ec_producer"), settings.cost, settings.seed)
        self.shares = EncoderShares()
        self.responses: dict[str, StoredResponse] = {}
        # An encode-only engine has no KV cache, and so no ranks.
        events = settings.events
        self.runners = [
            Runner(
                self._scheduler(rank),
                Publisher(events, rank) if events.publishes else None,
                tells_when_idle=self.tells_when_idle,
            )
            for rank in range(0 if self.encoder else settings.ranks)
        ]
        self.metrics = EngineMetrics(self.samples())
        # Templates, tokenization and image decoding must not delay the steps; the engine uses a process for them.
        self.renderer = ThreadPoolExecutor(1, thread_name_prefix="render")
        self.draining = False
        self.started = int(time.time())
        self.adapters = {adapter.name: adapter for adapter in settings.adapters}

    def _scheduler(self, rank: int) -> Scheduler:
        settings = self.settings
        size = settings.block_size
        limits = Limits(
            blocks=settings.blocks or max(_CACHE_TOKENS, self.context) // size + 2,
            block_size=size,
            max_model_len=self.context,
            max_batched_tokens=settings.max_batched_tokens,
            max_seqs=settings.max_seqs,
            largest_image=self.model.largest_image,
            prefix_caching=settings.prefix_caching,
        )
        arrived, seed = self.handover.arrived, settings.seed + rank
        return Scheduler(limits, cost=settings.cost, seed=seed, dialect=self.dialect(), embedded=arrived)

    @abstractmethod
    def dialect(self) -> Dialect:
        """Return how a rank hashes and publishes its blocks."""

    @abstractmethod
    def samples(self) -> Samples:
        """Return what ``/metrics`` shows."""

    def held(self) -> dict[str, Any]:
        """Return the body of ``/sim/cache``: the blocks of each rank's cache, and their ancestors. A block's ``parent``
        is the index of an earlier block in the list; ``held`` is false for blocks that are listed only as ancestors of
        others.
        """
        ranks = {}
        for rank, runner in enumerate(self.runners):
            places: dict[bytes, int] = {}
            blocks: list[dict[str, Any]] = []
            for block, held in runner.scheduler.contents.with_ancestors():
                places[block.digest] = len(blocks)
                blocks.append(
                    {
                        "digest": block.digest.hex(),
                        "parent": places[block.parent.digest] if block.parent is not None else None,
                        "token_ids": block.ids.tolist(),
                        "media": block.media,
                        "salt": block.salt,
                        "lora": block.lora,
                        "held": held,
                    }
                )
            ranks[str(rank)] = blocks
        return {"block_size": self.settings.block_size, "ranks": ranks}

    def pick(self, header: str | None) -> Runner:
        """Return the rank that a request is pinned to, or else the least loaded. Raises ``ValueError``."""
        if header is None:
            return min(self.runners, key=lambda runner: runner.load)
        if not header.isdecimal() or int(header) >= len(self.runners):
            raise ValueError(f"data_parallel_rank {header} is out of range [0, {len(self.runners)}).")
        return self.runners[int(header)]

    async def run(self) -> None:
        """Open the event sockets and step until cancelled. Raises ``zmq.ZMQError`` for an address in use."""
        try:
            for runner in self.runners:
                if runner.publisher is not None:
                    runner.publisher.start()
            async with asyncio.TaskGroup() as tasks:
                for runner in self.runners:
                    tasks.create_task(runner.run())
                if self.handover.config.listens is not None:
                    tasks.create_task(serve_readers(self.handover.answer, self.handover.config.listens))
                if self.pairing is not None and self.pairing.config.mode == "prefill":
                    tasks.create_task(serve_readers(self.pairing.connected, self.pairing.config.address))
                tasks.create_task(asyncio.Event().wait())  # an encode-only engine has no steps
        finally:
            for runner in self.runners:
                if runner.publisher is not None:
                    runner.publisher.close()
            if self.plugin is not None:
                self.plugin.close()
            self.shares.close()
            self.renderer.shutdown(wait=False, cancel_futures=True)

    async def drain(self) -> None:
        """Refuse new requests; let running ones finish for ``--shutdown-timeout`` seconds, then abort them."""
        self.draining = True
        try:
            async with asyncio.timeout(self.settings.shutdown_seconds):
                for runner in self.runners:
                    await runner.quiet()
        except TimeoutError:
            for runner in self.runners:
                runner.abort_all()


def simulated(settings: Settings, model: Model) -> SimulatedEngine:
    """Return the simulated engine that the settings name; modules of the other one are not imported."""
    module = import_module(f"mmrouter_sim.{settings.engine}.engine")
    return cast(SimulatedEngine, module.Engine(settings, model))
