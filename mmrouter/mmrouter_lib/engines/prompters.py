"""How each engine type makes a prompt of a chat. Apart from the adapters, which load neither tokenizer nor template."""

from collections.abc import Mapping
from typing import Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.sglang.prompter import SglangPrompter
from mmrouter_lib.prompt import Prompter

PROMPTERS: Final[Mapping[EngineType, type[Prompter]]] = {"vllm": Prompter, "sglang": SglangPrompter}
