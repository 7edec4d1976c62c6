"""Command lines of each engine type."""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.base.launch import EngineLauncher
from mmrouter_lib.engines.sglang.launch import SGLANG
from mmrouter_lib.engines.vllm.launch import VLLM

LAUNCHERS: Final[Mapping[EngineType, EngineLauncher]] = {launcher.type: launcher for launcher in (VLLM, SGLANG)}
