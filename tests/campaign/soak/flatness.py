"""Whether a size that is sampled over time has stopped growing. Pure."""

from collections.abc import Sequence
from statistics import median

MIN_SAMPLES = 8


def growth(samples: Sequence[float]) -> float:
    """Return by how much the median grows from the third quarter of the samples to the last one; the first half is
    warm-up. 0 for fewer samples than :data:`MIN_SAMPLES`.

    Medians are compared, because one garbage collection or one burst is no growth.
    """
    if len(samples) < MIN_SAMPLES:
        return 0.0
    half, last = len(samples) // 2, len(samples) * 3 // 4
    return median(samples[last:]) - median(samples[half:last])


def is_flat(samples: Sequence[float], *, share: float, least: float) -> bool:
    """Whether the growth is at most a share of the size in the third quarter, or at most ``least``."""
    if len(samples) < MIN_SAMPLES:
        return True
    return growth(samples) <= max(least, share * median(samples[len(samples) // 2 : len(samples) * 3 // 4]))
