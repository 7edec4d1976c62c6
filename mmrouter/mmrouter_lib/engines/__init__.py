"""Engine adapters: launch flags, event decoding, request rewriting and metric names of each engine type."""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.engines.base.adapter import EngineAdapter
from mmrouter_lib.engines.sglang.adapter import SGLANG
from mmrouter_lib.engines.vllm.adapter import VLLM

__all__ = ["ADAPTERS", "EngineAdapter", "adapter"]

ADAPTERS: Final[Mapping[str, EngineAdapter]] = {adapter.type: adapter for adapter in (VLLM, SGLANG)}


def adapter(engine_type: str) -> EngineAdapter:
    """Return the adapter of ``spec.engine.type``. Raises ``ValueError`` for another engine."""
    try:
        return ADAPTERS[engine_type]
    except KeyError:
        raise ValueError(
            f"there is no adapter for engine type {engine_type!r}, only for {' and '.join(ADAPTERS)}"
        ) from None
