"""The SGLang adapter. How SGLang names images is in :mod:`mmrouter_lib.engines.sglang.identity`."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.engines.base.adapter import (
    LABELS,
    EngineAdapter,
    EngineInfo,
    ImageRewrite,
    Removed,
    error_of,
    finite_number,
    load_parser,
    token_parser,
    without,
)
from mmrouter_lib.engines.base.answer_takeover import AnswerTraits
from mmrouter_lib.engines.base.launch import chosen_flags
from mmrouter_lib.engines.base.passed_routes import GENERATE
from mmrouter_lib.engines.base.release_order import is_before
from mmrouter_lib.engines.base.request_fields import CHAT, COMPLETIONS
from mmrouter_lib.engines.sglang.events import decode_batch
from mmrouter_lib.engines.sglang.hidden_groups import hidden_groups
from mmrouter_lib.engines.sglang.identity import compact_json
from mmrouter_lib.engines.sglang.request_fields import REMOVED_FIELDS, REQUEST_FIELDS

METRICS: Final = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "kv_usage": "sglang:token_usage",
    "prefix_queries": "sglang:prompt_tokens_total",
    "prefix_hits": "sglang:cached_tokens_total",
    "generated": "sglang:generation_tokens_total",
    "geometry": "sglang:page_size",
}
"""Quantity -> SGLang's metric name. With several data parallel ranks samples carry ``dp_rank``."""

# Ranks of a tensor parallel group report the same numbers, so the maximum counts instead of the sum. Samples with a
# priority repeat parts of the queue's total.
parse_load = load_parser(METRICS, "dp_rank", max, skip=re.compile(r'(?:^|,)\s*priority="[^"]'))
# Counters come from one process and are split by labels: streams or not, and the cache that held the tokens.
parse_tokens = token_parser(METRICS)

_PAGE_SIZE = re.compile(rf"^{re.escape(METRICS['geometry'])}(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)


def parse_block_size(metrics_text: str) -> int | None:
    """Return the engine's tokens per page, ``None`` where the text does not have it."""
    for _, text in _PAGE_SIZE.findall(metrics_text):
        size = finite_number(text)
        if size is not None and size >= 1:
            return int(size)
    return None


INFO_PATHS: Final = ("/server_info", "/model_info")

_ARGUMENTS = (
    "revision mm_preprocess_cache_size_mb mm_process_config mm_feature_transport image_processor_backend "
    "disable_fast_image_processor trust_mm_content_hashes dtype device speculative_algorithm language_only"
)
"""Resolved arguments that decide how an image is named."""


def parse_info(answers: Sequence[Mapping[str, Any]]) -> EngineInfo | None:
    """Read the answers of :data:`INFO_PATHS` as far as they have the right types; ``None`` when one of them failed."""
    server, model = answers
    if not (server and model):
        return None
    version = server.get("version")
    version = version if isinstance(version, str) else ""
    events = server.get("kv_events")
    size = events.get("block_size") if isinstance(events, Mapping) else server.get("page_size")
    facts = {"version": version}
    if isinstance(model.get("model_type"), str):
        facts["model_type"] = model["model_type"]
    if isinstance(model.get("architectures"), list):
        facts["architectures"] = compact_json(model["architectures"])
    facts |= {name: compact_json(server[name]) for name in _ARGUMENTS.split() if name in server}
    if isinstance(size, int):
        facts["page_size"] = compact_json(size)
    block_size = size if isinstance(size, int) and size > 0 else None
    device = server.get("device")
    device = device.partition(":")[0] if isinstance(device, str) else ""
    devices = _devices(server) if device else 0
    return EngineInfo(version, facts, block_size, device, devices, publishes=isinstance(events, Mapping))


def _devices(server: Mapping[str, Any]) -> int:
    """Return the devices of all ranks; with data parallel attention the ranks share those of the tensor ranks."""
    names = ("tp_size", "pp_size", *(() if server.get("enable_dp_attention") else ("dp_size",)))
    sizes = [size for name in names if isinstance(size := server.get(name), int)]
    return math.prod(sizes) if sizes else 0


REMOVED_PART_FIELDS: Final = ("content_hash", "uuid")
"""Fields of a content part and of its ``image_url`` that identify the content."""


def _rewrite_part(part: dict[str, Any], image: ImageRewrite | None, removed: Removed) -> dict[str, Any]:
    part = without(part, REMOVED_PART_FIELDS, "", removed)
    holders = [name for name in ("image_url", "video_url", "audio_url") if isinstance(part.get(name), dict)]
    part = part | {name: without(part[name], REMOVED_PART_FIELDS, f"{name}.", removed) for name in holders}
    if image is None or "video_url" in part:  # a video keeps its own bytes
        return part
    old = part.get("image_url")
    fields = old if isinstance(old, dict) else {}
    # The engine has no field for an identity on this endpoint, so ``ImageRewrite.uuid`` is not sent.
    return {**part, "type": "image_url", "image_url": {**fields, "url": image.url}}


_VALIDATION = re.compile(r"'loc': \('body', '([A-Za-z_]\w*)'")
_ABOUT_MESSAGES = re.compile(
    r"content hash mismatch"
    r"|Could not decode (?:image|audio|video)"
    r"|Error while loading data"
    r"|is longer than the model's context length"
    r"|exceeds the model's (?:maximum )?context length"
    r"|(?:Image|Video|Audio) count \d+ exceeds limit",
    re.IGNORECASE,
)


def prompt_error_field(status: int, body: Mapping[str, Any]) -> str | None:
    """Return the request field that an SGLang error answer is about, ``None`` if unknown.

    ``status`` is the HTTP status, ``body`` the decoded answer: ``{"object": "error", "message", "type", "param"}``
    from the chat endpoint, ``{"error": {...}}`` from the native one. ``param`` is nearly always null, so the engine's
    sentences are recognized (recorded answers of 0.5.23, and its sources).
    """
    if status < 400:
        return None
    message, param = error_of(body)
    if param is not None:
        return param
    if _ABOUT_MESSAGES.search(message):
        return "messages"
    named = _VALIDATION.search(message)
    return named[1] if named else None


def answer_traits(args: Sequence[Sequence[str]], config: Mapping[str, Any]) -> AnswerTraits:
    """Seeds have an effect only under this flag, which also seeds all other requests alike."""
    flag = frozenset({"--enable-deterministic-inference"})
    return AnswerTraits("all" if all(chosen_flags(each, flag) for each in args) else "none")


def adapter_fields(model: str, adapter: str) -> Mapping[str, str]:
    """The engine repeats ``model`` in its answer, and reads an adapter's name from it behind a colon."""
    return {"model": model if ":" in adapter else adapter, "lora_path": adapter}


def names_adapters(release: str) -> bool:
    """0.5.22 names adapters in another format of its events only (docs/engine-facts/sglang.md#event-frames)."""
    return not is_before((0, 5, 23), release)


def other_prompt(release: str, body: Mapping[str, Any]) -> str:
    """Releases before 0.5.23 show the fields of tools in their own order, with those that the client left out. Those
    before 0.5.22 join all system messages of ``/v1/responses``, whatever the template shows.
    """
    if body.get("tools") and is_before((0, 5, 23), release):
        return "tools"
    items = body.get("input")
    if not isinstance(items, list) or not is_before((0, 5, 22), release):
        return ""
    systems = (isinstance(item, dict) and item.get("role") in ("system", "developer") for item in items)
    return "input" if any(systems) else ""


def stores_responses(args: Sequence[str], _env: Mapping[str, str], _ranks: int) -> bool:
    """Several tokenizer processes have a store each, and any of them may get a request."""
    chosen = chosen_flags(args, frozenset({"--enable-response-store", "--tokenizer-worker-num"}))
    return "--enable-response-store" in chosen and chosen.get("--tokenizer-worker-num", "1") == "1"


SGLANG: Final = EngineAdapter(
    type="sglang",
    # /health generates a token; /ready is cheap, and answers 503 while draining
    # (docs/engine-facts/sglang.md#http-endpoints).
    health_path="/ready",
    decode_batch=decode_batch,
    metrics=METRICS,
    parse_load=parse_load,
    parse_tokens=parse_tokens,
    parse_block_size=parse_block_size,
    info_paths=INFO_PATHS,
    parse_info=parse_info,
    rewrite_part=_rewrite_part,
    prompt_error_field=prompt_error_field,
    request_fields=REQUEST_FIELDS,
    removed_fields=REMOVED_FIELDS,
    adapter_fields=adapter_fields,
    adapter_endpoints=frozenset({CHAT, COMPLETIONS}),  # /v1/responses takes an adapter's name and ignores it
    names_adapters=names_adapters,
    hidden_groups=hidden_groups,
    other_prompt=other_prompt,
    salted_routes=frozenset({GENERATE}),
    request_id_header="x-override-rid",
    continues_with_generation_prompt=True,
    learns_image_identity=True,
    asks_encoders_itself=True,
    pairs_prefill_and_decode=True,
    answer_traits=answer_traits,
    stores_responses=stores_responses,
    publishing_roles=frozenset({"worker", "prefill"}),
)
