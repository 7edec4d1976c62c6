"""Which drafter a vLLM engine's arguments start, as far as it decides what the engine hits.

A drafter that reads the model's hidden states needs those of the last tokens before the answer, so vLLM computes the
last block that it found in its cache anew (docs/engine-facts/vllm.md#drafters).
"""

import json
from collections.abc import Sequence
from typing import Any, Literal

from mmrouter_lib.engines.base.launch import chosen_flags
from mmrouter_lib.engines.base.release_order import is_before

Drafter = Literal["", "drops", "unknown"]
"""``drops``: the last block of a hit is computed anew; ``unknown``: the arguments do not tell whether it is."""

_FLAGS = ("--speculative-config", "-sc")
_READERS = ("eagle", "eagle3", "dflash", "dspark")  # and every method of a model's own that ends in "mtp"


def drafter(args: Sequence[str]) -> Drafter:
    """Return what the drafter of these arguments does to hits; ``unknown`` where vLLM derives it from a model."""
    given = [_config(args), *_dotted(args)]
    config = {key: value for part in given for key, value in part.items()}
    if not config:
        return ""
    method = config.get("method")
    if not isinstance(method, str):
        return "unknown"
    reads = method in _READERS or method.endswith("mtp")
    return "drops" if reads and config.get("disable_eagle_block_drop") is not True else ""


def sees_last(release: str) -> bool:
    """Whether the block of a prompt's last token may be the dropped one, where an engine has several cache groups."""
    return not is_before((0, 32), release)


def _config(args: Sequence[str]) -> dict[str, Any]:
    chosen = chosen_flags(args, frozenset(_FLAGS))
    for flag in _FLAGS:
        try:
            value = json.loads(chosen[flag])
        except (KeyError, ValueError):
            continue
        if isinstance(value, dict):
            return value
    return {"method": None} if chosen else {}


def _dotted(args: Sequence[str]) -> list[dict[str, Any]]:
    """Return the options that are written as ``--speculative-config.NAME VALUE``."""
    names = {arg.partition("=")[0].replace("_", "-") for arg in args if arg.startswith("-")}
    dotted = {name for name in names if any(name.startswith(f"{flag}.") for flag in _FLAGS)}
    values = {name.split(".", 1)[1].replace("-", "_"): text for name, text in chosen_flags(args, dotted).items()}
    return [{name: {"true": True}.get(text.lower(), text) for name, text in values.items()}]
