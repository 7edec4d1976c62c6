"""Dynamo's KV indexer, for ``check.py``: its selection service in this process, subscribed to the recorded events.

    python3.11 -m venv build/dynamo && build/dynamo/bin/pip install ai-dynamo-runtime==1.6.1 pyzmq msgpack
    python3 tests/kv_events/check.py -- build/dynamo/bin/python tests/kv_events/dynamo_consumer.py

Everything about events is Dynamo's own, from the socket to the index. Here is only what its frontend does with a
request: which images are in which block, the salt without the prefix that its workers add, and that the last token is
computed.
"""

import asyncio
import json
import struct
import sys
from typing import Any

import msgpack
import zmq
from dynamo.llm import SelectionService

SALT = "dynamo-cache-salt:"
MARK = 2_000_000  # token ids above those of any recording
APPLY_SECONDS = 60.0  # ends a hang


class Consumer:
    def __init__(self, head: dict[str, Any]) -> None:
        self._size: int = head["block_size"]
        self._socket = zmq.Context.instance().socket(zmq.XPUB)
        self._service = SelectionService(indexer_threads=1)
        self._sent = 0

    async def connect(self) -> None:
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        worker = {"worker_id": 1, "endpoint": "http://127.0.0.1:1", "block_size": self._size}
        await self._service.upsert_worker({**worker, "kv_events_endpoint": f"tcp://127.0.0.1:{port}"})
        self._socket.recv()  # its subscription: what is sent before is lost

    def publish(self, payload: bytes) -> None:
        self._socket.send_multipart([b"", struct.pack(">Q", self._sent), payload])
        self._sent += 1

    async def hit(self, request: dict[str, Any]) -> int:
        await self._all_applied()
        blocks = [self._images(request, begin) for begin in range(0, len(request["tokens"]), self._size)]
        asked = {
            "token_ids": request["tokens"],
            "block_mm_infos": blocks[: len(request["tokens"]) // self._size],
            "lora_name": request["adapter"],
            "cache_salt": request["salt"] and request["salt"].removeprefix(SALT),
        }
        found = await self._blocks({name: value for name, value in asked.items() if value})
        return min(found, (len(request["tokens"]) - 1) // self._size) * self._size

    def _images(self, request: dict[str, Any], begin: int) -> dict[str, Any] | None:
        """Return Dynamo's description of the images in the block that begins at a token."""
        inside = [
            {"mm_hash": int(identity[:16], 16), "offsets": [[offset, offset + length]]}
            for identity, offset, length in request["images"]
            if offset < begin + self._size and offset + length > begin
        ]
        return {"mm_objects": inside} if inside else None

    async def _all_applied(self) -> None:
        """Return once a block of tokens that no request has is found, which is published behind all events."""
        tokens = [MARK + self._sent] * self._size
        event = {"type": "BlockStored", "block_hashes": [(1 << 62) + self._sent], "parent_block_hash": None}
        event |= {"token_ids": tokens, "block_size": self._size, "lora_id": None, "medium": "GPU", "lora_name": None}
        self.publish(msgpack.packb([0.0, [event | {"kv_cache_spec_kind": "full_attention"}], None]))
        async with asyncio.timeout(APPLY_SECONDS):
            while not await self._blocks({"token_ids": tokens}):
                await asyncio.sleep(0.001)  # the service has no call that waits

    async def _blocks(self, asked: dict[str, Any]) -> int:
        workers = (await self._service.overlap_scores(asked))["workers"]
        return int(workers[0]["device_blocks"]) if workers else 0


async def main() -> None:
    consumer: Consumer | None = None
    for line in map(json.loads, sys.stdin):
        if "kv_events" in line:
            consumer = Consumer(line)
            await consumer.connect()
        assert consumer is not None, "the first line names the engine"
        if "events" in line:
            consumer.publish(bytes.fromhex(line["events"]))
        if "request" in line:
            print(json.dumps({"hit": await consumer.hit(line["request"])}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
