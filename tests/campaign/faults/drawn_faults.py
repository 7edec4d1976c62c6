"""Base of the targets of faults: each of them is drawn once before any of them again, and counted with its outcome."""

import random
from abc import abstractmethod
from collections.abc import Sequence

from campaign.target import BrokenPropertyError, Target


class DrawnFaults(Target):
    """An input is a line that names a fault, and a number from which the rest is drawn."""

    short = 0
    in_process = False
    limit_s = 1200.0  # above the sum of all waits

    def __init__(self) -> None:
        super().__init__()
        self._order: list[bytes] = []

    @abstractmethod
    def lines(self, source: random.Random) -> list[str]:
        """Return every line once, the first to be drawn as the last."""

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        if not self._order:
            self._order = [f"{line} {source.randrange(1000)}".encode() for line in self.lines(source)]
        return self._order.pop()

    def count(self, data: bytes, broken: Sequence[str]) -> None:
        """Count a fault. Raises :class:`BrokenPropertyError` for the promises that it broke."""
        self.totals["faults"] += 1
        if broken:
            raise BrokenPropertyError(f"{data.decode()}: " + "; ".join(broken[:5]))
