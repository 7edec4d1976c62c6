"""Runs Dynamo's selection service inside its own environment; commands come as JSON lines on stdin.

Times are taken here, around the call as a Python user makes it.
"""

import asyncio
import json
import sys
import time
from array import array
from typing import Any

import uvloop
from dynamo._core import SelectionService  # type: ignore[import-not-found, unused-ignore]

MODEL = "bench"
POLL_SECONDS = 0.02
SETTLE_SECONDS = 60
THREADS = 4
"""Threads of the indexer: the package's default."""


class Service:
    """The commands, and the state between them. Worker ids are 1 + the worker's number."""

    def __init__(self) -> None:
        self.service: Any = None
        self.prompts: list[list[int]] = []

    async def start(self, block_size: int, endpoints: list[str]) -> dict[str, Any]:
        """Create the service and its workers; it connects to their event sockets."""
        self.service = SelectionService(indexer_threads=THREADS)
        for number, endpoint in enumerate(endpoints):
            worker = {
                "worker_id": number + 1,
                "model_name": MODEL,
                "block_size": block_size,
                "endpoint": "http://127.0.0.1:1",
                "kv_events_endpoint": endpoint,
            }
            record = await self.service.upsert_worker(worker)
            if record["lifecycle"] != "schedulable":
                raise RuntimeError(f"worker {number}: {record}")
        return {}

    async def load(self, path: str, lengths: list[int]) -> dict[str, Any]:
        """Read prompts: concatenated token ids as u32."""
        self.prompts = []
        with open(path, "rb") as file:  # noqa: ASYNC230 - nothing else runs
            for length in lengths:
                ids = array("I")
                ids.fromfile(file, length)
                self.prompts.append(ids.tolist())
        return {}

    async def select(self, number: int) -> dict[str, Any]:
        """Place a prompt; answer microseconds and the blocks that the chosen worker holds."""
        request = {"model_name": MODEL, "token_ids": self.prompts[number]}
        began = time.perf_counter_ns()
        answer = await self.service.select(request)
        micros = (time.perf_counter_ns() - began) / 1000
        saved = len(self.prompts[number]) - answer["effective_prefill_tokens"]
        return {"us": micros, "overlap": saved // answer["block_size"]}

    async def _overlap(self, number: int, worker: int) -> int:
        """Return a worker's overlap with a prompt in blocks."""
        scores = await self.service.overlap_scores({"model_name": MODEL, "token_ids": self.prompts[number]})
        return next((int(w["device_blocks"]) for w in scores["workers"] if w["worker_id"] == worker + 1), 0)

    async def settle(self, blocks: list[int]) -> dict[str, Any]:
        """Wait until worker n holds the first ``blocks[n]`` blocks of prompt n; answer the CPU seconds used so far."""
        end = time.monotonic() + SETTLE_SECONDS
        for number, wanted in enumerate(blocks):
            while (held := await self._overlap(number, number)) < wanted:
                if time.monotonic() > end:
                    raise RuntimeError(f"worker {number} shows {held} of {wanted} blocks after {SETTLE_SECONDS} s")
                await asyncio.sleep(POLL_SECONDS)
        return {"cpu": time.process_time()}

    async def cpu(self) -> dict[str, Any]:
        """Answer the CPU seconds of this process, all threads."""
        return {"cpu": time.process_time()}


async def main() -> None:
    service = Service()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = await getattr(service, command.pop("do"))(**command)
        except Exception as error:  # the parent raises it
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
