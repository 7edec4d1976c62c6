"""A simulated engine without its HTTP side: model, ranks, processor cache, hand-over, and draining."""

import asyncio
import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from mmrouter_handover.plugin.item_exchange import read_settings
from mmrouter_sim.core.events import Dialect, VllmDialect
from mmrouter_sim.core.requests import ALGORITHMS, published_int
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.encoders import EncoderShares, ImageEncoder
from mmrouter_sim.media import BYTES_PER_TOKEN, RecentImages
from mmrouter_sim.metrics import EngineMetrics
from mmrouter_sim.model import AnswerGenerator, Model
from mmrouter_sim.rank_runner import Publisher, Runner
from mmrouter_sim.settings import Settings
from mmrouter_sim.sglang.pages import WRAPPERS, SglangDialect, fingerprint
from mmrouter_sim.sglang.pairing import PairRooms
from mmrouter_sim.vllm.connectors import ConnectorTransfers, EcTransfer, serve_readers
from mmrouter_sim.vllm.flags import VERSION
from mmrouter_sim.vllm.plugin import Plugin

_CACHE_TOKENS = 131_072  # tokens of each rank's KV cache, unless a flag sets them or the context is longer


class SimulatedEngine:
    """State shared by all requests. Raises ``ValueError`` for settings that the engine would not start with."""

    def __init__(self, settings: Settings, model: Model) -> None:
        self.settings = settings
        self.model = model
        self.context = settings.max_model_len or model.context
        self.images = RecentImages(settings.processor_cache_bytes // BYTES_PER_TOKEN)
        self.answers = AnswerGenerator(
            model.tokenizer, model.stop_ids, seed=settings.seed, mean_tokens=settings.answer_tokens
        )
        sglang = settings.engine == "sglang"
        self.handover = ConnectorTransfers(settings.handover, settings.cost)
        self.pairing = PairRooms(settings.pairs, settings.cost) if settings.pairs is not None else None
        self.encoder: ImageEncoder | None = None
        if settings.handover.encodes and settings.handover.ec is not None:
            self.encoder = ImageEncoder(settings.handover.ec, settings.cost, settings.seed)
            self.handover.embeddings = self.encoder.stored
        if settings.encodes_only:
            self.encoder = ImageEncoder(EcTransfer("ECCPUConnector", "ec_producer"), settings.cost, settings.seed)
        self.shares = EncoderShares()
        # An encode-only engine has no KV cache, and so no ranks.
        events = settings.events
        self.runners = [
            Runner(self._scheduler(rank), Publisher(events, rank) if events.publishes else None, tells_when_idle=sglang)
            for rank in range(0 if self.encoder else settings.ranks)
        ]
        self.metrics = EngineMetrics(settings, [runner.scheduler for runner in self.runners], self.encoder)
        self.plugin: Plugin | None = None
        if not sglang and "mmrouter" in os.environ.get("VLLM_PLUGINS", "").split(","):
            # Image processing depends on the model type and this flag, not on the folder's path.
            processing = f"{model.model_type} {sorted(settings.processor.items())}"
            role = "renderer" if settings.renders else "engine"
            self.plugin = Plugin(read_settings(os.environ), role, processing, self.images, VERSION)
        # Templates, tokenization and image decoding must not delay the steps; the engine uses a process for them.
        self.renderer = ThreadPoolExecutor(1, thread_name_prefix="render")
        self.draining = False
        self.started = int(time.time())

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
        dialect: Dialect
        if settings.engine == "sglang":
            dialect = SglangDialect(size)
        else:
            published = published_int if settings.int_hashes else bytes
            dialect = VllmDialect(size, hash_=ALGORITHMS[settings.hash_algorithm], published=published)
        arrived, seed = self.handover.arrived, settings.seed + rank
        scheduler = Scheduler(limits, cost=settings.cost, seed=seed, dialect=dialect, embedded=arrived)
        if settings.engine == "sglang":
            scheduler.reset()  # the engine announces its empty cache
        return scheduler

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

    @cached_property
    def fingerprint(self) -> str | None:
        """Fingerprint of the processor if images are named by encoded bytes; ``None`` if by pixels (SGLang)."""
        settings, model = self.settings, self.model
        if model.model_type not in WRAPPERS or not (model.model_type == "qwen3_vl" or settings.preprocess_cache_mb):
            return None
        process = settings.arguments.get("mm_process_config") or {}
        return fingerprint(model.model_type, list(model.architectures) or None, settings.revision, process)

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
