"""What a replay found."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Report:
    """``blocks`` were published and compared, ``matched`` of them are those that the requests predict.

    ``differences`` names, in order, every block that was published and not predicted, every block that was predicted
    and not published, and every gap in the stream. ``skipped`` says which rows could not be rebuilt and why, with the
    number of their blocks, which are not among ``blocks``; ``notes`` says on what the comparison rests.
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
        """The report as plain values."""
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
