"""Transfer KV blocks and embeddings between engines: vLLM's connector flags, and a side channel.

Only the two engines see the memory that a real connector moves, so the protocol between simulators is their own: JSON
lines with a request, an answer, and a confirmation of the copy. Everything visible from outside is vLLM's
(docs/engine-facts/vllm.md#encoder-disaggregation): parameters in answers and requests, held blocks with a lease, files
of ECExampleConnector, events of the receiving engine, and failures.
"""

import asyncio
import contextlib
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec

from mmrouter_sim.core.requests import Media, Request
from mmrouter_sim.core.scheduler import Scheduler
from mmrouter_sim.core.step_cost import Cost

log = logging.getLogger("mmrouter_sim.vllm.transfers")

CONNECT_SECONDS = 5.0
EMBEDDING_BYTES = 3072
"""Bytes of the embedding of one visual token: 1536 numbers of 2 bytes, as in Qwen2-VL-2B."""
_RECEIVED = 65_536  # remembered received embeddings


class TransferError(ConnectionError):
    """A transfer from another engine failed."""


class KvTransfer(msgspec.Struct, frozen=True):
    """``--kv-transfer-config``, as far as it is simulated."""

    kv_connector: Literal["NixlConnector"]
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    kv_load_failure_policy: Literal["recompute", "fail"] = "fail"
    kv_connector_extra_config: dict[str, Any] = {}


class EcTransfer(msgspec.Struct, frozen=True):
    """``--ec-transfer-config``, as far as it is simulated."""

    ec_connector: Literal["ECExampleConnector", "ECCPUConnector"]
    ec_role: Literal["ec_producer", "ec_consumer", "ec_both"]
    ec_connector_extra_config: dict[str, Any] = {}

    @property
    def folder(self) -> Path | None:
        """Folder of ECExampleConnector's files; ``None`` for other connectors."""
        if self.ec_connector != "ECExampleConnector":
            return None
        return Path(self.ec_connector_extra_config.get("shared_storage_path", "/tmp"))  # noqa: S108 - vLLM's default

    @property
    def room(self) -> int | None:
        """Visual tokens that an encoder keeps for its readers; ``None``: unlimited."""
        size = self.ec_connector_extra_config.get("ec_cpu_bytes")
        return None if size is None else int(size) // EMBEDDING_BYTES


class ConnectorConfig(msgspec.Struct, frozen=True):
    """Connectors from the launch flags and the environment. Addresses are (host, port)."""

    kv: KvTransfer | None = None
    ec: EcTransfer | None = None
    kv_address: tuple[str, int] = ("localhost", 5600)
    ec_address: tuple[str, int] = ("localhost", 5600)

    @property
    def encodes(self) -> bool:
        """Whether the engine only encodes, without a language model. See
        docs/engine-facts/vllm.md#encoder-disaggregation.
        """
        return self.ec is not None and self.ec.ec_role == "ec_producer"

    @property
    def listens(self) -> tuple[str, int] | None:
        """Address of this engine's side channel, ``None`` without one."""
        if self.kv is not None and self.kv.kv_role != "kv_consumer":
            return self.kv_address
        return self.ec_address if self.encodes and self.ec is not None and self.ec.folder is None else None


def connector_config(kv: str, ec: str) -> ConnectorConfig:
    """Return the connectors of both flags and the environment. Raises ``ValueError`` for invalid JSON."""

    def address(prefix: str) -> tuple[str, int]:
        host = os.environ.get(f"{prefix}_SIDE_CHANNEL_HOST", "localhost")
        return host, int(os.environ.get(f"{prefix}_SIDE_CHANNEL_PORT", "5600"))

    return ConnectorConfig(
        kv=msgspec.json.decode(kv, type=KvTransfer) if kv else None,
        ec=msgspec.json.decode(ec, type=EcTransfer) if ec else None,
        kv_address=address("VLLM_NIXL"),
        ec_address=address("VLLM_EC"),
    )


class TransferRequest(msgspec.Struct, omit_defaults=True):
    """A line of a reader: a request, or the confirmation of a copy. The owner answers with a :class:`Ready` line."""

    kv: str = ""
    ec: str = ""
    copied: str = ""


class Ready(msgspec.Struct):
    """The owner's answer: the tokens to copy, 0 if it holds them no more; how many of them it had in its cache."""

    tokens: int
    cached: int = 0


def line(message: msgspec.Struct) -> bytes:
    return msgspec.json.encode(message) + b"\n"


async def fetch(
    host: str, port: int, ask: msgspec.Struct, confirm: msgspec.Struct, seconds_per_token: float, wait: float | None
) -> Ready:
    """Request a copy from its owner, take the time of it, and confirm it. Raises :class:`TransferError`. ``wait``:
    seconds until the answer.
    """
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
        with contextlib.closing(writer):
            writer.write(line(ask))
            async with asyncio.timeout(wait):
                ready = msgspec.json.decode(await reader.readline(), type=Ready)
            if not ready.tokens:
                raise TransferError("it holds it no more")
            await asyncio.sleep(ready.tokens * seconds_per_token)
            writer.write(line(confirm))
            await writer.drain()
            return ready
    except (OSError, ValueError, TimeoutError) as error:
        raise TransferError(f"{host}:{port}: {error or type(error).__name__}") from error


async def serve_readers(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]], address: tuple[str, int]
) -> None:
    """Serve readers until cancelled. Raises ``OSError`` if the address is in use."""
    async with await asyncio.start_server(answer, *address) as server:
        await server.serve_forever()


class ConnectorTransfers:
    """Blocks and embeddings that one engine holds for others or has received."""

    def __init__(self, config: ConnectorConfig, cost: Cost) -> None:
        self.config = config
        self.engine_id = str(uuid4())
        self._cost = cost
        self._held: dict[str, tuple[Scheduler, Request, asyncio.TimerHandle]] = {}
        self._received: OrderedDict[str, None] = OrderedDict()
        self.embeddings: Mapping[str, int] = {}
        """Visual tokens of the embeddings that this engine serves to others, by identifier."""

    def offer(self, scheduler: Scheduler, request: Request) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` of a finished prefill, ``None`` if it holds no blocks for a reader."""
        config = self.config.kv
        if config is None or request.id not in scheduler.held:
            return None
        lease = float(config.kv_connector_extra_config.get("kv_lease_duration", 30))
        timer = asyncio.get_running_loop().call_later(lease, self._expire, request.id)
        self._held[request.id] = (scheduler, request, timer)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [scheduler.held[request.id]],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.id,
            "remote_host": self.config.kv_address[0],
            "remote_port": self.config.kv_address[1],
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": request.prompt_length,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": request.cached_tokens or 0,
        }

    async def take(self, params: Mapping[str, Any]) -> int:
        """Fetch the blocks of a prefill and return its tokens. Raises :class:`TransferError`."""
        ask = TransferRequest(kv=str(params.get("remote_request_id", "")))
        return await self._fetch(params.get("remote_host"), params.get("remote_port"), ask, self._cost.kv_seconds)

    def _expire(self, name: str) -> None:
        self._held[name][0].counters.expired += 1
        self._give(name)

    def _give(self, name: str) -> None:
        scheduler, _, timer = self._held.pop(name)
        timer.cancel()
        scheduler.give(name)

    async def receive(self, params: Mapping[str, Any], media: Sequence[Media]) -> None:
        """Fetch the embeddings of ``ec_transfer_params``; missing ones are encoded here."""
        peers = {item.identifier: params.get(item.identifier) for item in media}
        for name, peer in peers.items():
            if not isinstance(peer, dict) or "peer_host" not in peer or self.arrived(name):
                continue
            try:
                ask = TransferRequest(ec=name)
                await self._fetch(peer["peer_host"], peer.get("peer_port"), ask, self._cost.embedding_seconds)
            except TransferError as error:
                log.warning("embedding %s: %s", name, error)
                continue
            self._received[name] = None
            if len(self._received) > _RECEIVED:
                self._received.popitem(last=False)

    def arrived(self, identifier: str) -> bool:
        config = self.config.ec
        if config is None or config.ec_role == "ec_producer":
            return False
        if config.folder is None:
            return identifier in self._received
        return embedding_file(config.folder, identifier).is_file()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, ValueError):
            while question := await reader.readline():
                ask = msgspec.json.decode(question, type=TransferRequest)
                if ask.copied:
                    if ask.copied in self._held:
                        self._give(ask.copied)
                    continue
                held = self._held.get(ask.kv)
                tokens = held[1].prompt_length if held is not None else self.embeddings.get(ask.ec, 0)
                writer.write(line(Ready(tokens)))
                await writer.drain()

    async def _fetch(self, host: object, port: object, ask: TransferRequest, seconds_per_token: float) -> int:
        """Return the tokens of what an owner of blocks or embeddings gave. Raises :class:`TransferError`."""
        if not isinstance(host, str) or not isinstance(port, int):
            raise TransferError("the parameters name no address")
        copied = TransferRequest(copied=ask.kv or ask.ec)
        return (await fetch(host, port, ask, copied, seconds_per_token / self._cost.speed, None)).tokens


def embedding_file(folder: Path, identifier: str) -> Path:
    return folder / identifier / "encoder_cache.safetensors"


def write_embedding(folder: Path, identifier: str, tokens: int) -> None:
    """Write an embedding file of the right format and size, without content. Raises ``OSError``."""
    size = tokens * EMBEDDING_BYTES
    entry = {"dtype": "BF16", "shape": [tokens, EMBEDDING_BYTES // 2], "data_offsets": [0, size]}
    header = msgspec.json.encode({"ec_cache": entry})
    path = embedding_file(folder, identifier)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid4().hex[:8]}")
    with partial.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + size)
    partial.rename(path)  # atomic
