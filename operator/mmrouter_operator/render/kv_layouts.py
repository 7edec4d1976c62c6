"""Which prefill and decode pools can exchange KV blocks, as far as the resource says it. Pure.

A deployment's prefill and decode pools change together (``inputs.compatibility``) and need not be alike: connectors
translate tensor parallelism, vLLM's also block sizes. What they do not translate, the number format of a block for one,
must be equal, and engines of pools that say otherwise refuse each other. So their pods bear one more label, and routers
pair no engines with different ones.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment, Pool, block_size_of
from mmrouter_lib.engines.base.launch import chosen_flags
from mmrouter_lib.engines.launchers import LAUNCHERS
from mmrouter_operator.model.labels import KV_LAYOUT
from mmrouter_operator.render.pod.template_inputs import SET_ROLES

_UNSAID: Final = ("", "auto")


@dataclass(frozen=True, slots=True)
class Unequal:
    """Two pools that cannot exchange blocks. ``differs``: what -> what the first and what the second pool says."""

    prefill: str
    decode: str
    differs: dict[str, tuple[str, str]]

    def sentence(self) -> str:
        """Return it for people."""
        found = (
            f"{what} is {one or 'not set'} and {other or 'not set'}" for what, (one, other) in self.differs.items()
        )
        return f"pools {self.prefill} and {self.decode} cannot exchange KV blocks: {', '.join(found)}"


def unequal(dep: MMRouterDeployment) -> list[Unequal]:
    """Return every prefill and decode pool that cannot work together."""
    found = layouts(dep)
    pairs = [
        Unequal(
            one.name,
            other.name,
            {
                what: (found[one.name].get(what, ""), found[other.name].get(what, ""))
                for what in sorted(found[one.name].keys() | found[other.name].keys())
                if found[one.name].get(what) != found[other.name].get(what)
            },
        )
        for one in dep.spec.pools
        for other in dep.spec.pools
        if (one.role, other.role) == ("prefill", "decode")
    ]
    return [pair for pair in pairs if pair.differs]


def layout_label(dep: MMRouterDeployment, pool: Pool) -> dict[str, str]:
    """Return the label of a pool's pods; nothing where all of the deployment that exchange blocks are alike."""
    found = layouts(dep)
    if pool.name not in found or all(layout == found[pool.name] for layout in found.values()):
        return {}
    return {KV_LAYOUT: hashlib.sha256(json.dumps(found[pool.name], sort_keys=True).encode()).hexdigest()[:8]}


def layouts(dep: MMRouterDeployment) -> dict[str, dict[str, str]]:
    """Return by pool what must be equal for an exchange of blocks: flag, or ``blockSize``, -> what the pool says.

    What a pool leaves to its engine counts as what the others say, where they agree and an engine may choose it.
    """
    pools = [pool for pool in dep.spec.pools if pool.role in SET_ROLES]
    engine = LAUNCHERS[dep.spec.engine.type]
    said: dict[str, dict[str, str]] = {pool.name: _said(dep, pool, engine.kv_exact_flags) for pool in pools}
    for flag, choices in engine.kv_exact_flags.items():
        values = {layout[flag] for layout in said.values()} - {""}
        chosen = {value for value in values if choices is None or value in choices}
        if len(chosen) == 1:
            for layout in said.values():
                layout[flag] = layout[flag] or next(iter(chosen))
    if engine.kv_exact_block_size:
        for pool in pools:
            said[pool.name]["blockSize"] = str(block_size_of(dep, pool))
    return said


def _said(dep: MMRouterDeployment, pool: Pool, flags: Any) -> dict[str, str]:
    found = chosen_flags([*dep.spec.engine.args, *pool.args], frozenset(flags))
    return {flag: "" if found.get(flag, "") in _UNSAID else _plain(found[flag]) for flag in flags}


def _plain(value: str) -> str:
    """Return a value in one spelling."""
    return {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32"}.get(value, value)
