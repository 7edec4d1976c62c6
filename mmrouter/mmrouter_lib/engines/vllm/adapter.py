"""The vLLM adapter."""

import operator
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, Final

from mmrouter_lib.engines.base.adapter import (
    LABELS,
    EngineAdapter,
    EngineInfo,
    ImageRewrite,
    Removed,
    error_of,
    load_parser,
    token_parser,
    without,
)
from mmrouter_lib.engines.base.launch import chosen_flags
from mmrouter_lib.engines.base.passed_routes import GENERATE, PASSED_ROUTES, TRANSCRIBE, UNCACHED
from mmrouter_lib.engines.vllm.answer_takeover import CONTINUATION, answer_traits
from mmrouter_lib.engines.vllm.drafters import drafter, sees_last
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.engines.vllm.request_fields import REMOVED_FIELDS, REMOVED_XARGS, REQUEST_FIELDS


def parse_info(answers: Sequence[Mapping[str, Any]]) -> EngineInfo:
    version = answers[0].get("version")
    return EngineInfo(version if isinstance(version, str) else "")


METRICS: Final = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv_usage": "vllm:kv_cache_usage_perc",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "generated": "vllm:generation_tokens_total",
    "geometry": "vllm:cache_config_info",
}
"""Quantity -> vLLM's metric name. All carry the label ``engine``, the data parallel rank."""

parse_load = load_parser(METRICS, "engine", operator.add)
parse_tokens = token_parser(METRICS)

_GEOMETRY = re.compile(rf"^{re.escape(METRICS['geometry'])}{LABELS}", re.MULTILINE)
_BLOCK_SIZE = re.compile(r'(?:^|,)\s*block_size="(\d+)"')
_CACHE_BYTES = re.compile(r'(?:^|,)\s*kv_cache_memory_bytes="\d+"')


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's tokens per block, ``None`` where the text does not have it."""
    for labels in _GEOMETRY.findall(metrics_text):
        size = _BLOCK_SIZE.search(labels)
        if size and int(size[1]) > 0:
            return int(size[1])
    return None


def shows_cpu(metrics_text: str) -> bool:
    """Whether the metrics name a size of the KV cache, which without a flag only a CPU sets: from
    ``VLLM_CPU_KVCACHE_SPACE`` (docs/engine-facts/vllm.md#devices).
    """
    return any(_CACHE_BYTES.search(labels) for labels in _GEOMETRY.findall(metrics_text))


def sets_cache_bytes(args: Sequence[str]) -> bool:
    """Whether arguments have ``--kv-cache-memory-bytes``, which vLLM takes shortened, too."""
    return any(arg.replace("_", "-").startswith("--kv-cache-m") for arg in args)


def _rewrite_part(part: dict[str, Any], image: ImageRewrite | None, removed: Removed) -> dict[str, Any]:
    # ``uuid`` stands beside ``image_url``; vLLM ignores it inside that object (docs/engine-facts/vllm.md#image-uuid).
    part = without(part, ("uuid",), "", removed)
    if image is None:
        return part
    if part.get("type") in ("video_url", "audio_url"):
        return {**part, "uuid": image.uuid}
    old = part.get("image_url")
    fields = without(old, ("uuid",), "image_url.", removed) if isinstance(old, dict) else {}
    return {**part, "type": "image_url", "image_url": {**fields, "url": image.url}, "uuid": image.uuid}


_PARAMETER = re.compile(r"\(parameter=([A-Za-z_][\w.]*)")
_ABOUT_MESSAGES = re.compile(
    r"Cache miss for \w+ at index"
    r"|Failed to (?:apply|load image|load audio)"
    r"|(?:prompt|input)[^.]* (?:is )?longer than the maximum model length"
    r"|maximum context length"
    r"|prompt cannot be empty"
    r"|may be provided in one prompt"
    r"|cannot identify image file"
    r"|exceeds the pre-allocated encoder cache",
    re.IGNORECASE,
)
_PARAM_NAMES = dict.fromkeys(("image", "video", "audio", "input_text", "input_tokens"), "messages")
"""Parameters that vLLM names after its own arguments -> the client's field."""


def prompt_error_field(status: int, body: Mapping[str, Any]) -> str | None:
    """Return the request field that a vLLM error answer is about, ``None`` if unknown.

    ``status`` is the HTTP status, ``body`` the decoded answer. vLLM leaves ``param`` null for most errors of images and
    prompts, so their sentences are recognized (docs/engine-facts/vllm.md#requests-that-end-the-engine).
    """
    if status < 400:
        return None
    message, param = error_of(body)
    if param is None and (named := _PARAMETER.search(message)):
        param = named[1]
    if param is not None:
        param = param.removeprefix("body.")
        return _PARAM_NAMES.get(param, param)
    return "messages" if _ABOUT_MESSAGES.search(message) else None


MIME_SUFFIXES: Final = {
    "image/png": ".png",
    "image/jpeg": ".jpg",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/bmp": ".bmp",
    "image/tiff": ".tiff",
}
"""File suffixes, for people who list the folder: the engine detects the format from the content."""

_REFUSED: Final = re.compile(rb"allowed-local-media-path|\[Errno \d+\]")


def file_url(path: PurePath) -> str:
    """Return the URL by which a chat names a file. Raises ``ValueError`` for a path that is not absolute."""
    return path.as_uri()


def is_file_refused(status: int, raw: bytes) -> bool:
    """Whether an engine's error is about a local file: gone, not readable, or outside of its folder.

    vLLM 0.32 answers 500 with the system's error text for a file that it cannot read, 500 for any file when started
    without a folder, and 400 for a file outside of it.
    """
    return status in (400, 500) and _REFUSED.search(raw) is not None


def stores_responses(args: Sequence[str], env: Mapping[str, str], ranks: int) -> bool:
    """Several server processes, one per rank by default, have a store each, and any of them may get a request."""
    servers = chosen_flags(args, frozenset({"--api-server-count"})).get("--api-server-count", "1")
    return env.get("VLLM_ENABLE_RESPONSES_API_STORE", "0") != "0" and ranks == 1 and servers == "1"


VLLM: Final = EngineAdapter(
    type="vllm",
    health_path="/health",
    decode_batch=decode_batch,
    metrics=METRICS,
    parse_load=parse_load,
    parse_tokens=parse_tokens,
    parse_block_size=parse_block_size,
    shows_cpu=shows_cpu,
    info_paths=("/version",),
    parse_info=parse_info,
    rewrite_part=_rewrite_part,
    prompt_error_field=prompt_error_field,
    request_fields=REQUEST_FIELDS,
    removed_fields=REMOVED_FIELDS,
    removed_xargs=REMOVED_XARGS,
    adapter_fields=lambda model, adapter: {"model": adapter},
    salted_routes=frozenset(PASSED_ROUTES) - UNCACHED - {GENERATE, TRANSCRIBE},
    drafter=drafter,
    drafter_sees_last=sees_last,
    continues_with_generation_prompt=False,
    learns_image_identity=False,
    asks_encoders_itself=False,
    pairs_prefill_and_decode=False,
    answer_traits=answer_traits,
    stores_responses=stores_responses,
    response_query=frozenset({"stream", "starting_after"}),
    continuation=CONTINUATION,
    publishing_roles=frozenset({"worker", "prefill", "decode"}),
)
