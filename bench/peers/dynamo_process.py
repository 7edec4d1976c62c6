"""Runs inside the peer's own environment: Dynamo's selection service, told what to do by JSON lines on stdin.

One command per line, one answer per line. Times are taken here, around the call as a Python user makes it.
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


class Child:
    """State between commands. Worker ids are 1 + the worker's number."""

    def __init__(self) -> None:
        self.service: Any = None
        self.prompts: list[list[int]] = []

    async def start(self, threads: int, block_size: int, endpoints: list[str]) -> dict[str, Any]:
        """Make a service and its workers; their event sockets are connected from here on."""
        if self.service is not None:
            self.service.shutdown()
        self.service = SelectionService(indexer_threads=threads)
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
        """Read prompts: token ids as u32, back to back."""
        self.prompts = []
        with open(path, "rb") as file:  # noqa: ASYNC230 - nothing else runs meanwhile
            for length in lengths:
                ids = array("I")
                ids.fromfile(file, length)
                self.prompts.append(ids.tolist())
        return {}

    async def select(self, number: int) -> dict[str, Any]:
        """One decision: microseconds, and the blocks that the chosen worker need not compute."""
        request = {"model_name": MODEL, "token_ids": self.prompts[number]}
        began = time.perf_counter_ns()
        answer = await self.service.select(request)
        micros = (time.perf_counter_ns() - began) / 1000
        saved = len(self.prompts[number]) - answer["effective_prefill_tokens"]
        return {"us": micros, "overlap": saved // answer["block_size"]}

    async def overlaps(self, number: int) -> dict[str, Any]:
        """Overlap of every worker for one prompt, by worker number."""
        scores = await self.service.overlap_scores({"model_name": MODEL, "token_ids": self.prompts[number]})
        return {"overlaps": {str(w["worker_id"] - 1): w["device_blocks"] for w in scores["workers"]}}

    async def settle(self, blocks: list[int], seconds: float) -> dict[str, Any]:
        """Wait until worker n holds the first ``blocks[n]`` blocks of prompt n. Answers CPU seconds used up to now."""
        end = time.monotonic() + seconds
        for number, wanted in enumerate(blocks):
            while True:
                found = (await self.overlaps(number))["overlaps"].get(str(number), 0)
                if found >= wanted:
                    break
                if time.monotonic() > end:
                    raise RuntimeError(f"worker {number} shows {found} of {wanted} blocks after {seconds:g} s")
                await asyncio.sleep(POLL_SECONDS)
        return {"cpu": time.process_time()}

    async def cpu(self) -> dict[str, Any]:
        """CPU seconds of this process, all threads."""
        return {"cpu": time.process_time()}


async def main() -> None:
    """Serve commands until stdin ends."""
    child = Child()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = await getattr(child, command.pop("do"))(**command)
        except Exception as error:  # whatever the peer raises is the driver's to report
            answer = {"error": f"{type(error).__name__}: {error}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    uvloop.run(main())
