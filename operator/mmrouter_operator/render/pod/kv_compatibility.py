"""Which prefill and decode pools may exchange KV blocks.

They change together and need not be equal: connectors translate tensor parallelism, and vLLM's also block sizes. What
they do not translate, such as the number format of a block, must be equal, else engines refuse each other: their pods
get one more label, and routers pair only equal ones.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from mmrouter_lib.api import MMRouterDeployment, Pool, block_size_of
from mmrouter_lib.engines.base.launch import chosen_flags
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.kinds import KV_LAYOUT
from mmrouter_operator.render.pod.spec_hashes import SET_ROLES

_UNSET: Final = ("", "auto")
_SPELLINGS: Final = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}


@dataclass(frozen=True, slots=True)
class LayoutMismatch:
    """A prefill and a decode pool that cannot exchange blocks. ``differs``: property -> its value in each of them."""

    prefill: str
    decode: str
    differs: dict[str, tuple[str, str]]

    def sentence(self) -> str:
        """Return a sentence for messages."""
        properties = (
            f"{name} is {prefill or 'not set'} and {decode or 'not set'}"
            for name, (prefill, decode) in self.differs.items()
        )
        return f"pools {self.prefill} and {self.decode} cannot exchange KV blocks: {', '.join(properties)}"


def mismatches(dep: MMRouterDeployment) -> list[LayoutMismatch]:
    """Return every pair of a prefill and a decode pool that cannot work together."""
    by_pool = layouts(dep)
    pairs = [
        LayoutMismatch(prefill.name, decode.name, _differences(by_pool[prefill.name], by_pool[decode.name]))
        for prefill in dep.spec.pools
        for decode in dep.spec.pools
        if (prefill.role, decode.role) == ("prefill", "decode")
    ]
    return [pair for pair in pairs if pair.differs]


def layout_label(dep: MMRouterDeployment, pool: Pool) -> dict[str, str]:
    """Return the layout label of a pool's pods; empty if all pools that exchange blocks have the same layout."""
    by_pool = layouts(dep)
    if pool.name not in by_pool or all(layout == by_pool[pool.name] for layout in by_pool.values()):
        return {}
    return {KV_LAYOUT: hashlib.sha256(json.dumps(by_pool[pool.name], sort_keys=True).encode()).hexdigest()[:8]}


def layouts(dep: MMRouterDeployment) -> dict[str, dict[str, str]]:
    """Return by pool the properties that must be equal for an exchange of blocks: flags, and ``blockSize``.

    A flag that a pool leaves unset counts as set like in the other pools, if these agree and an engine may choose it.
    """
    pools = [pool for pool in dep.spec.pools if pool.role in SET_ROLES]
    engine = LAUNCHERS[dep.spec.engine.type]
    by_pool = {pool.name: _explicit(dep, pool, engine.kv_exact_flags) for pool in pools}
    for flag, choices in engine.kv_exact_flags.items():
        values = {layout[flag] for layout in by_pool.values()} - {""}
        chosen = {value for value in values if choices is None or value in choices}
        if len(chosen) == 1:
            for layout in by_pool.values():
                layout[flag] = layout[flag] or next(iter(chosen))
    if engine.kv_exact_block_size:
        for pool in pools:
            by_pool[pool.name]["blockSize"] = str(block_size_of(dep, pool))
    return by_pool


def _explicit(dep: MMRouterDeployment, pool: Pool, flags: Iterable[str]) -> dict[str, str]:
    chosen = chosen_flags([*dep.spec.engine.args, *pool.args], frozenset(flags))
    values = {flag: chosen.get(flag, "") for flag in flags}
    return {flag: "" if value in _UNSET else _SPELLINGS.get(value, value) for flag, value in values.items()}


def _differences(prefill: dict[str, str], decode: dict[str, str]) -> dict[str, tuple[str, str]]:
    pairs = {name: (prefill.get(name, ""), decode.get(name, "")) for name in sorted(prefill.keys() | decode.keys())}
    return {name: pair for name, pair in pairs.items() if prefill.get(name) != decode.get(name)}
