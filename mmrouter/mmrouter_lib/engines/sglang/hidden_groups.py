"""Layers of a model whose evictions no event of SGLang tells (docs/engine-facts/sglang.md#states-and-windows).

SGLang publishes the nodes of its tree, which are blocks of full attention. States (mamba, linear attention, short
convolutions) and blocks behind a window are dropped without an event, so the blocks that an engine holds are the most
that it hits, and the least is none.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

STATES: Final = "states"
WINDOWS: Final = "windows"

STATE_STEP: Final = 256
"""Tokens at the end of a prompt that may be in no event: a tree with states keeps a prompt up to a multiple of the
model's chunk or of a page, if they are larger than a token."""

_STATES = re.compile(r"mamba|ssm|linear_|conv|lightning|hybrid|full_attention_interval|^cca")
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
_WINDOWS = re.compile(
    r"(?:Beam|DeepseekV4|GptOss|Granite(?:Moe)?SWA|IQuestQ1|Laguna|Mellum|MiMoV2\w*|MuseGlimmer|Step3p[57]\w*|UnlimitedOCR)"
    r"ForCausalLM|(?:Inkling|Llama4|MuseGlimmer|Step3p7)ForConditionalGeneration|\w*Gemma4\w*"
)
"""Architectures of which SGLang 0.5.23 keeps only the blocks within a window, for some layers. Others keep all."""


def hidden_groups(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return :data:`STATES` and :data:`WINDOWS` as far as a config.json's model has such layers on SGLang.

    A layer whose kind is not known counts as one with states.
    """
    text = config.get("text_config")
    text = text if isinstance(text, Mapping) else {}
    kinds = {*(config.get("layer_types") or ()), *(text.get("layer_types") or ())}
    states = any(_STATES.search(key) for key in (*config, *text)) or not kinds <= _ATTENTION
    names = map(str, config.get("architectures") or ())
    windows = text.get("is_hybrid_swa") or config.get("is_hybrid_swa") or any(map(_WINDOWS.fullmatch, names))
    return (STATES,) * states + (WINDOWS,) * bool(windows)
