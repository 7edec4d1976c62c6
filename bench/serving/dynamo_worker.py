"""An engine of Dynamo's frontend with a fixed answer; runs on the Python of the peer's environment, with the model's
folder and the answer as arguments.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvloop
from dynamo.llm import ModelInput, ModelType, WorkerType, register_model  # type: ignore[import-not-found, unused-ignore]
from dynamo.runtime import DistributedRuntime  # type: ignore[import-not-found, unused-ignore]
from tokenizers import Tokenizer

BLOCK_SIZE = 16


async def main(model: str, text: str) -> None:
    """Serve until killed."""
    ids = Tokenizer.from_file(str(Path(model) / "tokenizer.json")).encode(text).ids
    runtime = DistributedRuntime(asyncio.get_running_loop(), "file", "tcp", event_plane="zmq")
    endpoint = runtime.endpoint("bench.backend.generate")

    async def generate(request: Any, context: Any = None) -> AsyncIterator[dict[str, Any]]:
        yield {"token_ids": ids, "finish_reason": "stop"}

    options = {"worker_type": WorkerType.Aggregated, "kv_cache_block_size": BLOCK_SIZE}
    await register_model(ModelInput.Tokens, ModelType.Chat, endpoint, model, "bench", **options)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], sys.argv[2]))
