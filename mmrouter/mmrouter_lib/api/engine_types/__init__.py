"""The engine types of the resource, each with the tables that its validation needs."""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.api.engine_types.base import EngineTraits, EngineType, OwnedFlag
from mmrouter_lib.api.engine_types.sglang import SGLANG
from mmrouter_lib.api.engine_types.vllm import VLLM

__all__ = ["ENGINE_TYPES", "EngineTraits", "EngineType", "OwnedFlag"]

ENGINE_TYPES: Final[Mapping[EngineType, EngineTraits]] = {traits.type: traits for traits in (VLLM, SGLANG)}
