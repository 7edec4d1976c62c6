"""Target ``soak_month``: a month of one engine, sidecar and router in virtual time; every size is flat.

An input is a number of days and a seed. A month takes ten minutes of CPU time, so the gate lives some hours
(``tests/unit/campaign/test_soak.py``).
"""

import logging
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from campaign.soak.month import Month
from campaign.target import BrokenPropertyError, Target

DAYS = 30
SAMPLES = 120


class SoakMonth(Target):
    """One month after the other."""

    name = "soak_month"
    short = 0
    limit_s = 7200.0

    def __enter__(self) -> Self:
        logging.disable(logging.WARNING)
        return self

    def __exit__(self, *_: object) -> None:
        logging.disable(logging.NOTSET)

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        return f"{DAYS} {source.randrange(1000)}".encode()

    def check(self, data: bytes) -> str:
        days, seed = data.decode().split()
        with tempfile.TemporaryDirectory(prefix="mmrouter-soak-") as folder:
            month = Month(seed, Path(folder))
            month.live(float(days), SAMPLES)
            problems = month.problems()
        counts = month.world.counts
        self.totals["days"] += int(days)
        self.totals["decisions"] += counts.pop("decisions")
        self.totals["faults"] += counts.total()
        self.keep_largest(
            **{
                "MiB of journal": round(max(month.sizes.journal) / 2**20, 1),
                "keys in the index": max(month.sizes.index),
                "blocks of memory": max(month.sizes.allocated),
            }
        )
        if problems:
            raise BrokenPropertyError(f"{data.decode()}: " + "; ".join(problems))
        return "flat"
