"""The result of a replay: compared blocks, differences, and skipped rows."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class ReplayReport:
    """``blocks`` were published and compared; the requests predict ``matched`` of them.

    ``differences``: in order, every block published but not predicted, every block predicted but not published, and
    every gap in the stream. ``skipped``: rows that could not be rebuilt, with the reason and their number of blocks,
    which are not among ``blocks``. ``notes``: the basis of the comparison.
    """

    engine: str
    blocks: int = 0
    matched: int = 0
    prompts: int = 0
    rendered: int = 0
    differences: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def unexplained(self) -> int:
        return len(self.differences)

    @property
    def line(self) -> str:
        return f"blocks={self.blocks} matched={self.matched} unexplained={self.unexplained}"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {
            "engine": self.engine,
            "blocks": self.blocks,
            "matched": self.matched,
            "unexplained": self.unexplained,
            "prompts": self.prompts,
            "rendered": self.rendered,
            "first_difference": self.differences[0] if self.differences else None,
            "differences": self.differences,
            "skipped": self.skipped,
            "notes": self.notes,
        }
