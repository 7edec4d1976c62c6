"""Cache groups of an engine, and what a hit needs of each of them.

vLLM keeps the layers of a model in cache groups, each with blocks of its own under one chain of hashes. A prompt is hit
up to a block where every group can continue (docs/engine-facts/vllm.md#cache-groups):

- full attention holds every block before it;
- a sliding window holds those blocks that the window covers before it;
- mamba holds the state at that block's end, as a window of one block would;
- chunked local attention holds every block since the begin of the chunk in which the hit ends.

Windows may have blocks of another size than full attention; a hit then ends where blocks of all sizes end.

A group of any other kind has to hold every block here, and so has one of chunks whose length is not known. That is
enough for each of vLLM's kinds, so the promise is a lower bound. A drafter that reads hidden states makes the engine
compute the last block of each attention group's hit anew, unless its hashes cover the tokens that the drafter reads
after a block. Pure.
"""

from collections.abc import Mapping, Sequence
from math import lcm
from typing import Any, Final, NamedTuple

import msgspec

DEVICE: Final = "GPU"
"""Medium of blocks in device memory; vLLM says GPU on every device (docs/engine-facts/vllm.md#devices)."""
LOWER_TIERS: Final = {"CPU": "host", "CPU_PINNED": "host", "STORAGE": "disk", "DISK": "disk"}
"""Media from which an engine loads blocks that follow those on its device, by the tier that they are; fastest first."""
FULL_KINDS = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds that keep every block; groups of releases that send no kind have full attention."""
WINDOW_KINDS = frozenset({"sliding_window", "sliding_window_mla"})
MAMBA = "mamba"
CHUNKS = "chunked_local_attention"
_OTHER_CONFIG = ("--hf-overrides", "--hf-config-path", "--config-format")


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
    """Groups that must hold the last blocks before a hit's end: as many as ``tokens`` before the next one reach.

    ``block_size``: tokens of their blocks, 0 for as many as the primary group's have.
    """

    tokens: int
    groups: tuple[int, ...]
    block_size: int = 0


class CacheLayout(NamedTuple):
    """The groups of an engine by what a hit needs of them.

    ``primary``: the group that names all blocks of a prompt, the first one with full attention, else one with the
    widest window. ``whole``: groups that must hold every block before a hit's end. ``tails``: widest first. ``bounds``:
    why an engine may hit more than its groups promise, empty where the promise is exact. ``comparable``: the keys of
    all groups can be compared; otherwise nothing is promised. ``recomputed``: groups of which a hit needs one block
    more than it has, because the engine computes that one anew for its drafter. ``sees_last``: that one may be the
    block of the prompt's last token. ``lookahead``: tokens after a block that its key covers too. ``chunked``: groups
    that must hold every block since the begin of the chunk in which a hit ends, and ``chunk`` its tokens.
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
    chunk: int = 0
    chunked: tuple[int, ...] = ()

    @property
    def leading(self) -> bool:
        """Whether a hit is the leading blocks of one group."""
        return not (self.tails or self.chunked or self.recomputed or len(self.whole) > 1)

    def hit_step(self, block_size: int) -> int:
        """Return the number of blocks that a hit is a multiple of: where the larger blocks of a window end."""
        return lcm(block_size, *(tail.block_size or block_size for tail in self.tails)) // block_size

    def recomputed_blocks(self, tokens: int, block_size: int) -> int:
        """Return the held blocks that a repeat of a prompt cannot hit, beside the one of its last token."""
        if block_size < 1:
            return 0
        most = max(0, tokens - 1) // block_size
        if not self.recomputed:
            return most % self.hit_step(block_size)
        looked_at = tokens if self.sees_last else tokens - 1
        return max(0, most - max(0, looked_at // block_size - 1))


def cache_layout(
    groups: Sequence[CacheGroup],
    *,
    complete: bool = True,
    drafter: str = "",
    sees_last: bool = True,
    keys_of_full: bool = True,
    chunk: int = 0,
) -> CacheLayout:
    """Return the layout of an engine with these groups; without any, that of group 0 with full attention.

    ``complete``: every group of the engine and all blocks that it announces are in the feed, which older sidecars do
    not ensure. ``drafter``, ``sees_last``: what it does to hits (:mod:`mmrouter_lib.engines.vllm.drafters`).
    ``keys_of_full``: a window's block has the key of the block of full attention that ends with it; smaller ones have
    it together, while all that make up that block are held. ``chunk``: tokens of a chunk of chunked local attention, 0
    where that is not known.
    """
    full: list[int] = []
    others: list[int] = []
    chunked: list[int] = []
    bounds: list[str] = []
    tails: dict[tuple[int, int], list[int]] = {}
    lookahead = max((group.lookahead for group in groups), default=0)
    if lookahead:
        drafter = ""  # what it reads of the next tokens is in the hash, so no block is computed anew
    sizes = _other_sizes(groups)
    comparable = sizes is not None and (not sizes or (keys_of_full and not drafter))
    for group in groups:
        if group.window and (group.kind in WINDOW_KINDS or not group.kind):
            size = group.block_size if comparable and sizes else 0
            tails.setdefault((group.window, size), []).append(group.group)
        elif group.kind == MAMBA:
            tails.setdefault((1, 0), []).append(group.group)
        elif group.kind in FULL_KINDS:
            full.append(group.group)
        elif group.kind == CHUNKS and chunk > 0 and not drafter:
            chunked.append(group.group)
        else:
            others.append(group.group)
            bounds.append(group.kind)
    if chunked and not full:  # vLLM then takes chunks up to the prompt's last token, which no model has
        others, chunked, bounds = [*others, *chunked], [], [*bounds, CHUNKS]
    if len(groups) > 1 and not all(group.kind for group in groups):
        bounds.append("no_kind")
    if any(group.parts for group in groups) and any(group.kind == MAMBA for group in groups):
        bounds.append("parts")  # beside windows, vLLM announces parts of blocks and never hits them
    if len(groups) > 1 and not complete:
        bounds.append("old_feed")
    if not comparable:
        bounds.append("block_size")
    whole = (*full, *others) if groups else (0,)
    if lookahead and not whole:
        bounds.append("lookahead")
    if drafter == "unknown" or (drafter and any(tokens > 1 for tokens, _ in tails)):
        # Events do not tell whether a window's group is among those that the drafter reads.
        bounds.append("drafter")
    ordered = tuple(Tail(tokens, tuple(held), size) for (tokens, size), held in sorted(tails.items(), reverse=True))
    primary = whole[0] if whole else ordered[0].groups[0]
    members = frozenset(group.group for group in groups) or frozenset(whole)
    states = {group.group for group in groups if group.kind == MAMBA}
    recomputed = members - states if drafter else frozenset()
    # Of one group, an engine leaves the block of a prompt's last token out before it looks, as without a drafter.
    sees_last = sees_last and bool(recomputed) and len(members) > 1
    return CacheLayout(
        primary,
        members,
        whole,
        ordered,
        tuple(dict.fromkeys(bounds)),
        comparable,
        recomputed,
        sees_last,
        lookahead,
        chunk if chunked else 0,
        tuple(chunked),
    )


def chunk_tokens(config: Mapping[str, Any], args: Sequence[str]) -> int:
    """Return the tokens of a chunk of a model's chunked local attention, 0 where it has none or they are not known.

    ``config``: of its config.json; ``args``: of its engines, which may override it.
    """
    if any(argument.replace("_", "-").startswith(_OTHER_CONFIG) for argument in args):
        return 0
    text = config.get("text_config")
    value = (text if isinstance(text, Mapping) else config).get("attention_chunk_size")
    return value if type(value) is int and value > 0 else 0


def window_blocks(window: int, block_size: int) -> int:
    """Return the blocks that a hit needs before its end (docs/engine-facts/vllm.md#sliding-windows)."""
    return max(1, -(-(window - 1) // block_size))


def _other_sizes(groups: Sequence[CacheGroup]) -> set[int] | None:
    """Return the sizes of windows' blocks that differ from full attention's, ``None`` where keys cannot be compared.

    They can where each size is a multiple of the other or a part of it, and a window takes whole blocks of either.
    """
    sizes = {group.block_size for group in groups if group.block_size}
    if len(sizes) <= 1:
        return set()
    full = {group.block_size for group in groups if group.kind not in WINDOW_KINDS}
    if len(full) != 1 or 0 in full or not all(group.block_size for group in groups):
        return None
    (size,) = full
    for group in groups:
        if group.block_size % size and (
            size % group.block_size or window_blocks(group.window, group.block_size) * group.block_size % size
        ):
            return None
    return sizes - full
