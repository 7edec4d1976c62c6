"""What an SGLang engine reports in ``/server_info`` and ``/model_info``, as far as image identity depends on it.

The sidecar reads both once per start of the engine and sends the result in its heartbeats as a map of texts
(``facts``), from which the router computes an image's identity (docs/engine-facts/sglang.md#artifact-identity).
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.engines.base.server_info import EngineInfo

INFO_PATHS: Final = ("/server_info", "/model_info")

_ARGUMENTS = (
    "revision",
    "mm_preprocess_cache_size_mb",
    "mm_process_config",
    "mm_feature_transport",
    "image_processor_backend",
    "disable_fast_image_processor",
    "trust_mm_content_hashes",
    "dtype",
    "device",
    "speculative_algorithm",
    "language_only",
)
"""Resolved arguments that decide how an image is named."""


def parse_info(answers: Sequence[Mapping[str, Any]]) -> EngineInfo | None:
    """Read the answers of :data:`INFO_PATHS`; fields that are missing or of another type are left out.

    Returns ``None`` when one of them failed.
    """
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
        facts["architectures"] = _json(model["architectures"])
    facts |= {name: _json(server[name]) for name in _ARGUMENTS if name in server}
    if isinstance(size, int):
        facts["page_size"] = _json(size)
    return EngineInfo(
        version=version,
        block_size=size if isinstance(size, int) and size > 0 else None,
        publishes=isinstance(events, Mapping),
        facts=facts,
    )


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))
