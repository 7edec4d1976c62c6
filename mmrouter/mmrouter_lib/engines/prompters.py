"""How each engine type makes a prompt of a chat, and of a request to ``/v1/responses``.

Apart from the adapters, which load neither tokenizer nor template.
"""

from collections.abc import Mapping
from functools import partial
from typing import Final

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.base.response_chat import ChatOf
from mmrouter_lib.engines.sglang.prompts import response_chats
from mmrouter_lib.engines.sglang.prompts.prompter import SglangPrompter
from mmrouter_lib.engines.vllm import harmony_responses
from mmrouter_lib.prompt import AnyPrompter, HarmonyPrompter, Prompter

PROMPTERS: Final[Mapping[EngineType, type[Prompter]]] = {"vllm": Prompter, "sglang": SglangPrompter}


def response_chat(engine: EngineType, prompter: AnyPrompter | None) -> ChatOf | None:
    """Return what makes the chat of a request to ``/v1/responses`` that engines get as it is.

    ``None`` where they get a chat instead.
    """
    if isinstance(prompter, HarmonyPrompter):
        return harmony_responses.chat_of
    if engine != "sglang":
        return None
    later = isinstance(prompter, SglangPrompter) and response_chats.shows_later_systems(prompter.source)
    return partial(response_chats.chat_of, later_systems=later)
