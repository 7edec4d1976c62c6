"""``/v1/chat/completions`` of an encode-only engine: no tokens, but the locations of the embeddings.

See docs/engine-facts/vllm.md#encoder-disaggregation.
"""

import time
import uuid
from typing import Any

from starlette.responses import Response

from mmrouter_sim.encoder_engine import ImageEncoder
from mmrouter_sim.engine import SimulatedEngine
from mmrouter_sim.errors import json_response
from mmrouter_sim.vllm.connectors import EMBEDDING_BYTES
from mmrouter_sim.vllm.prompts import Prompt
from mmrouter_sim.vllm.schema import ChatRequest


async def answer(engine: SimulatedEngine, encoder: ImageEncoder, body: ChatRequest, prompt: Prompt) -> Response:
    """Encode a chat's images and return the locations of their embeddings."""
    await encoder.encode(prompt.media)
    length = len(prompt.ids)
    usage: dict[str, Any] = {"prompt_tokens": length, "total_tokens": length, "completion_tokens": 0}
    if engine.settings.token_details:
        images = None if prompt.visual_tokens is None else {"image": prompt.visual_tokens}
        details = {"cached_tokens": 0, "created_cache_tokens": 0, "multimodal_tokens": images}
        usage["prompt_tokens_details"] = details
    message: dict[str, Any] = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "reasoning": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    return json_response(
        {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": body.model or engine.settings.served_names[0],
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": None,
            "ec_transfer_params": _params(engine, prompt) or None,
        }
    )


def _params(engine: SimulatedEngine, prompt: Prompt) -> dict[str, Any]:
    """Return each identifier's items and, without a shared folder, the address of its owner.

    The engine's ``metadata`` (the grid of patches) is for readers without pixels, which are not simulated.
    """
    config = engine.settings.handover
    places: dict[str, dict[str, Any]] = {}
    for number, item in enumerate(prompt.media):
        place = places.setdefault(item.identifier, {"item_indices": [], "metadata": {}})
        place["item_indices"].append(number)
        if config.ec is not None and config.ec.folder is None:
            host, port = config.ec_address
            shape = [item.length, EMBEDDING_BYTES // 2]
            size = item.length * EMBEDDING_BYTES
            place |= {"peer_host": host, "peer_port": port, "size_bytes": size, "shape": shape}
    return places
