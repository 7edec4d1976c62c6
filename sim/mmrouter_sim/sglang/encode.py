"""``/encode`` of a simulated SGLang encoder (docs/engine-facts/sglang.md#encoder-disaggregation)."""

import asyncio
import hashlib
import struct
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from mmrouter_sim.core.hashing import Media
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import RequestError, json_response
from mmrouter_sim.sglang import prompts
from mmrouter_sim.sglang.encoder_shares import Embedding, EncodeRequest, Part


async def encode(engine: SimulatedEngine, request: Request) -> Response:
    """``POST /encode``: encode the images, send the result to the engine, and answer."""
    encoder = engine.encoder
    assert encoder is not None
    try:
        part = msgspec.json.decode(await request.body(), type=EncodeRequest)
    except msgspec.DecodeError as error:
        return _error(400, str(error), None)
    if not part.mm_items or part.num_parts < 1 or not 0 <= part.part_idx < part.num_parts:
        return _error(400, "missing or empty mm_items" if not part.mm_items else "part_idx", part.req_id)
    sent = Part(part.req_id, part.part_idx, part.num_parts, [])
    status = 200
    try:
        items = [item if isinstance(item, dict) else {"url": item} for item in part.mm_items]
        loop = asyncio.get_running_loop()
        made = [await loop.run_in_executor(engine.renderer, _embedding, engine, item) for item in items]
        await encoder.encode([Media(str(one.digest), 0, one.tokens) for one in made])
        sent.embeddings = [(one.digest, one.tokens) for one in made]
    except RequestError as error:
        sent.error, status = str(error), error.status
    if part.embedding_port is not None:
        await engine.shares.send(part.prefill_host, part.embedding_port, sent)
    return _error(status, sent.error, part.req_id) if sent.error else json_response(None)


def _embedding(engine: SimulatedEngine, item: dict[str, Any]) -> Embedding:
    pixels, tokens = prompts.picture(engine, item)
    digest = hashlib.sha256(b"embedding" + struct.pack(">Q", pixels)).digest()
    return Embedding(int.from_bytes(digest[:8], "big"), tokens)


def _error(status: int, message: str, request: str | None) -> Response:
    return json_response({"status": "error", "message": message, "req_id": request}, status)
