"""Parse the load of an engine's data parallel ranks from its Prometheus text."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

LABELS = r'\{((?:[^"}]|"(?:[^"\\]|\\.)*")*)\}'
"""Regular expression for a sample's labels, one group: the text between the braces."""

_FIELDS = ("running", "waiting", "kv_usage")


@dataclass(frozen=True, slots=True)
class RankLoad:
    """One rank: requests running, requests waiting, share of KV blocks in use (0..1)."""

    running: float = 0.0
    waiting: float = 0.0
    kv_usage: float = 0.0


class LoadParser:
    """Parse samples of three gauges, by rank."""

    def __init__(
        self,
        names: Mapping[str, str],
        rank_label: str,
        combine: Callable[[float, float], float],
        skip: re.Pattern[str] | None = None,
    ) -> None:
        """``names``: field of :class:`RankLoad` -> metric name. ``combine`` merges two samples of one rank, starting
        from 0. Samples whose labels match ``skip`` are left out.
        """
        alternatives = "|".join(re.escape(names[field]) for field in _FIELDS)
        self._sample = re.compile(rf"^({alternatives})(?:{LABELS})?[ \t]+(\S+)", re.MULTILINE)
        self._rank = re.compile(rf'(?:^|,)\s*{rank_label}="(\d+)"')
        self._fields = {names[field]: field for field in _FIELDS}
        self._combine, self._skip = combine, skip

    def __call__(self, metrics_text: str) -> dict[int, RankLoad]:
        """Return data parallel rank -> load from the text of ``/metrics``, empty without any of the gauges."""
        ranks: dict[int, dict[str, float]] = {}
        for name, labels, text in self._sample.findall(metrics_text):
            value = finite_number(text)
            if value is None or (self._skip is not None and self._skip.search(labels)):
                continue
            rank = self._rank.search(labels)
            values = ranks.setdefault(int(rank[1]) if rank else 0, {})
            field = self._fields[name]
            values[field] = self._combine(values.get(field, 0.0), value)
        return {rank: RankLoad(**values) for rank, values in sorted(ranks.items())}


def finite_number(text: str) -> float | None:
    """Return the number that a sample's text is, ``None`` for anything else, NaN and infinities."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None
