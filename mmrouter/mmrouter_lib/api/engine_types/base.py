"""What the resource's rules depend on per engine type: owned flags, default block sizes, supported roles."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mmrouter_lib.api.sections.accelerator import AcceleratorKind

EngineType = Literal["vllm", "sglang"]


class OwnedFlag(NamedTuple):
    """An engine flag that ``engine.args`` and ``pools[].args`` must not set."""

    name: str
    field: str | None
    """Field of ``spec`` to use instead."""
    why: str


def owned(why: str, field: str | None, names: str) -> Iterator[OwnedFlag]:
    """Yield the flags in ``names``, separated by blanks."""
    for name in names.split():
        yield OwnedFlag(name, field, why)


@dataclass(frozen=True, slots=True)
class EngineTraits:
    """One engine type, as the resource's validation sees it."""

    type: EngineType
    owned_flags: tuple[OwnedFlag, ...]
    default_block_sizes: Mapping[AcceleratorKind, int]
    """Tokens per KV block where neither pool nor engine sets them."""
    has_renderers: bool
    """Whether pools of role renderer exist for it."""
    supports_transfer: bool
    """Whether ``routing.transfer`` may be other than ``none``."""
