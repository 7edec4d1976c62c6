"""Cache groups of an engine, and what a hit needs of each of them.

vLLM keeps the layers of a model in cache groups, each with blocks of its own under one chain of hashes. A prompt is hit
up to a block where every group can continue (docs/engine-facts/vllm.md#cache-groups):

- full attention holds every block before it;
- a sliding window holds those blocks that the window covers before it;
- mamba holds the state at that block's end, as a window of one block would.

A group of any other kind has to hold every block here. That is enough for each of vLLM's kinds, so the promise is a
lower bound. A drafter that reads hidden states makes the engine compute the last block of each attention group's hit
anew, unless its hashes cover the tokens that the drafter reads after a block. Pure.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

DEVICE: Final = "GPU"
"""Medium of blocks in device memory; vLLM says GPU on every device (docs/engine-facts/vllm.md#devices)."""
LOWER_TIERS: Final = {"CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}
"""Media from which an engine loads blocks that follow those on its device, by the tier that they are; fastest first."""
FULL_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds that keep every block; groups of releases that send no kind have full attention."""
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
MAMBA = "mamba"


class CacheGroup(msgspec.Struct, frozen=True, array_like=True):
    """A cache group that events have named, on any rank; ``kind`` is the engine's name for it, or empty.

    ``block_size``: tokens per block on the device, 0 where the sidecar does not tell. ``parts``: there were entries for
    parts of blocks, too, so the engine may hit a prompt up to the middle of a block. ``lookahead``: tokens after a
    block that its hash covers too, so that the block serves only prompts that continue with them.
    """

    group: int
    kind: str
    window: int = 0  # tokens; 0 for groups without a window
    block_size: int = 0
    parts: bool = False
    lookahead: int = 0


class Tail(NamedTuple):
    """Groups that must hold the last blocks before a hit's end: as many as ``tokens`` before the next one reach."""

    tokens: int
    groups: tuple[int, ...]


class CacheLayout(NamedTuple):
    """The groups of an engine by what a hit needs of them.

    ``primary``: the group that names all blocks of a prompt, the first one with full attention, else one with the
    widest window. ``whole``: groups that must hold every block before a hit's end. ``tails``: widest first. ``bounds``:
    why an engine may hit more than its groups promise, empty where the promise is exact. ``comparable``: all groups
    have one block size; otherwise nothing is promised. ``recomputed``: groups of which a hit needs one block more than
    it has, because the engine computes that one anew for its drafter. ``sees_last``: that one may be the block of the
    prompt's last token. ``lookahead``: tokens after a block that its key covers too.
    """

    primary: int
    groups: frozenset[int]
    whole: tuple[int, ...]
    tails: tuple[Tail, ...] = ()
    bounds: tuple[str, ...] = ()
    comparable: bool = True
    recomputed: frozenset[int] = frozenset()
    sees_last: bool = False
    lookahead: int = 0

    @property
    def leading(self) -> bool:
        """Whether a hit is the leading blocks of one group."""
        return not (self.tails or self.recomputed or len(self.whole) > 1)

    def recomputed_blocks(self, tokens: int, block_size: int) -> int:
        """Return the held blocks that a repeat of a prompt cannot hit, beside the one of its last token."""
        if not self.recomputed or block_size < 1:
            return 0
        looked_at = tokens if self.sees_last else tokens - 1
        return max(0, max(0, tokens - 1) // block_size - max(0, looked_at // block_size - 1))


def cache_layout(
    groups: Sequence[CacheGroup], *, complete: bool = True, drafter: str = "", sees_last: bool = True
) -> CacheLayout:
    """Return the layout of an engine with these groups; without any, that of group 0 with full attention.

    ``complete``: every group of the engine and all blocks that it announces are in the feed, which older sidecars do
    not ensure. ``drafter``, ``sees_last``: what it does to hits (:mod:`mmrouter_lib.engines.vllm.drafters`).
    """
    full: list[int] = []
    others: list[int] = []
    bounds: list[str] = []
    tails: dict[int, list[int]] = {}
    for group in groups:
        if group.window and (group.kind in WINDOW_KINDS or not group.kind):
            tails.setdefault(group.window, []).append(group.group)
        elif group.kind == MAMBA:
            tails.setdefault(1, []).append(group.group)
        elif group.kind in FULL_KINDS:
            full.append(group.group)
        else:
            others.append(group.group)
            bounds.append(group.kind)
    if len(groups) > 1 and not all(group.kind for group in groups):
        bounds.append("no_kind")
    if any(group.parts for group in groups):
        bounds.append("parts")
    if len(groups) > 1 and not complete:
        bounds.append("old_feed")
    comparable = len({group.block_size for group in groups if group.block_size}) <= 1
    if not comparable:
        bounds.append("block_size")
    whole = (*full, *others) if groups else (0,)
    lookahead = max((group.lookahead for group in groups), default=0)
    if lookahead:
        drafter = ""  # what it reads of the next tokens is in the hash, so no block is computed anew
        if not whole:
            bounds.append("lookahead")
    if drafter == "unknown" or (drafter and tails.keys() - {1}):
        # Events do not tell whether a window's group is among those that the drafter reads.
        bounds.append("drafter")
    ordered = tuple(Tail(tokens, tuple(members)) for tokens, members in sorted(tails.items(), reverse=True))
    primary = whole[0] if whole else ordered[0].groups[0]
    members = frozenset(group.group for group in groups) or frozenset(whole)
    states = {group.group for group in groups if group.kind == MAMBA}
    recomputed = members - states if drafter else frozenset()
    # Of one group, an engine leaves the block of a prompt's last token out before it looks, as without a drafter.
    sees_last = sees_last and bool(recomputed) and len(members) > 1
    why = tuple(dict.fromkeys(bounds))
    return CacheLayout(primary, members, whole, ordered, why, comparable, recomputed, sees_last, lookahead)
