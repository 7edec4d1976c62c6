"""Cache groups that an engine's events have named (``mmrouter_lib.cache_layout``). Pure; no I/O."""

from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from mmrouter_lib.cache_layout import DEVICE, FULL_KINDS, CacheGroup, cache_layout
from mmrouter_lib.engines.base.events import Cleared, Event, Ignored, Ragged, Stored


class KnownGroups:
    """All groups by number.

    ``ordered``: those with full attention, then the others, each in ascending order. ``named``: number -> kind and
    lookahead of those that blocks on the device have named. ``primary``: the group whose block size is the engine's.
    ``full``: the first group with full attention, and ``beside``: all others if there is one.
    """

    def __init__(self) -> None:
        self._groups: dict[int, CacheGroup] = {}
        self._order()

    def __iter__(self) -> Iterator[CacheGroup]:
        return iter(self.ordered)

    def clear(self) -> None:
        self._groups.clear()
        self._order()

    def put(self, group: CacheGroup) -> None:
        self._groups[group.group] = group
        self._order()

    def in_order(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return a batch's events, between two clears those of full attention first, from which others get their keys.

        Events of one group keep their order; no event depends on one of another group otherwise. Without
        :attr:`beside` the order is that of the batch.
        """
        ordered: list[Event] = []
        later: list[Event] = []
        for event in events:
            if isinstance(event, Cleared):
                ordered += [*later, event]
                later = []
            elif isinstance(event, Ignored) or event.group not in self.beside:
                ordered.append(event)
            else:
                later.append(event)
        return ordered + later

    def unnamed(self, event: Stored | Ragged) -> CacheGroup | None:
        """Return the group that an event is the first one to name, or whose lookahead it shows, or ``None``.

        An event without hashes shows no lookahead.
        """
        known, on_device = self._groups.get(event.group), event.medium == DEVICE
        if known is None or known.kind != event.kind or (on_device and not known.block_size):
            size = event.block_size if on_device else 0
            return CacheGroup(event.group, event.kind, event.window or 0, size, lookahead=event.lookahead)
        return replace(known, lookahead=event.lookahead) if event.lookahead > known.lookahead else None

    def with_parts(self, event: Stored, block_size: int) -> CacheGroup | None:
        """Return an event's group as one with entries of several sizes, ``None`` if that is known or of no matter."""
        known = self._groups[event.group]
        changed = replace(known, block_size=block_size, parts=True)
        return changed if event.medium == DEVICE and changed != known else None

    def _order(self) -> None:
        groups = sorted(self._groups.values(), key=lambda group: (not _is_full(group), group.group))
        self.ordered = tuple(groups)
        self.named = {group.group: (group.kind, group.lookahead) for group in groups if group.block_size}
        self.primary = cache_layout(groups).primary
        self.full = groups[0].group if groups and _is_full(groups[0]) else None
        self.beside = frozenset(self._groups) - {self.full} if self.full is not None else frozenset()


def _is_full(group: CacheGroup) -> bool:
    return group.kind in FULL_KINDS and not group.window
