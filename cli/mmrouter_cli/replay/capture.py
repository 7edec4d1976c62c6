"""Captures (JSON lines, one per request, with the event frames that followed it), their models, and the report.

There is one form per engine. vLLM rows name their ``kind`` (``meta``, ``step``, ``render``, ``generate`` or
``replay``); a frame is ``{"seq": hex, "payload": hex}``. SGLang rows name their ``case``; a frame is
``{"seq": number, "payload_hex": hex}``, and rows made without a server have a ``kind`` and ``events``.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from mmrouter_lib.engines.base.events import EventError
from mmrouter_lib.families import Family, ModelFolderError, ProcessorLimits, load_family
from mmrouter_lib.prompt import Prompter

EngineName = Literal["vllm", "sglang"]
KEY = bytes(range(32))
"""An arbitrary key: a replay is one deployment."""
_VLLM_KINDS = frozenset({"meta", "render", "generate", "replay"})


class CaptureError(Exception):
    """The file is no capture or has nothing to compare; the message says where and why."""


class Frame(NamedTuple):
    """One message of the event stream."""

    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a capture. ``number`` counts from 1, as editors do."""

    number: int
    raw: Mapping[str, Any]
    frames: tuple[Frame, ...]

    @property
    def kind(self) -> str:
        return str(self.raw.get("kind") or ("case" if "case" in self.raw else "step"))

    @property
    def label(self) -> str:
        return str(self.raw.get("label") or self.raw.get("case") or self.raw.get("step") or self.kind)

    @property
    def where(self) -> str:
        return f"line {self.number} ({self.label})"


class Capture(NamedTuple):
    """A whole file. ``meta`` is its first line's metadata, empty where there is none."""

    path: Path
    engine: EngineName
    meta: Mapping[str, Any]
    rows: tuple[Row, ...]


def read(path: Path, engine: EngineName | None) -> Capture:
    """Read a capture. ``engine`` is needed only where no row identifies it; without it vLLM is assumed.

    Raises :class:`CaptureError`, also for a capture of another engine than ``engine``.
    """
    rows: list[Row] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except OSError as error:
        raise CaptureError(f"cannot read {path}: {error.strerror}") from error
    if not rows:
        raise CaptureError(f"{path} is empty")
    meta = rows[0].raw if rows[0].kind == "meta" else {}
    detected = _detect_engine(rows)
    if engine and detected and engine != detected:
        raise CaptureError(f"{path} is a capture of {detected}, not of {engine}")
    return Capture(path, engine or detected or "vllm", meta, tuple(row for row in rows if row.kind != "meta"))


@contextmanager
def comparing(capture: Capture, row: Row) -> Iterator[None]:
    """Raise :class:`CaptureError` for malformed fields of a row, which have no schema."""
    try:
        yield
    except (AttributeError, LookupError, OverflowError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise CaptureError(f"{capture.path}, {row.where}: a field has an unexpected value ({reason})") from error


def _row(path: Path, number: int, line: bytes) -> Row:
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise CaptureError(f"{path}, line {number}: an object is expected, not {type(raw).__name__}")
    frames = raw.get("frames", [])
    if not isinstance(frames, list):
        raise CaptureError(f"{path}, line {number}: frames must be a list")
    return Row(number, raw, tuple(_frame(f"{path}, line {number}, frame {at}", f) for at, f in enumerate(frames)))


def _frame(where: str, raw: Any) -> Frame:
    try:
        seq, payload = raw["seq"], raw.get("payload", raw.get("payload_hex"))
        return Frame(int(seq, 16) if isinstance(seq, str) else int(seq), bytes.fromhex(payload))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CaptureError(
            f"{where}: a frame has seq and a payload in hex ({type(error).__name__}: {error})"
        ) from error


def _detect_engine(rows: Iterable[Row]) -> EngineName | None:
    """Return the engine by fields that only its rows have, ``None`` without such fields."""
    for row in rows:
        if "page_size" in row.raw or "caller_hash" in row.kind or _in_frames(row, "payload_hex"):
            return "sglang"
        if row.kind in _VLLM_KINDS or _in_frames(row, "payload"):
            return "vllm"
    return None


def _in_frames(row: Row, key: str) -> bool:
    return any(key in frame for frame in row.raw.get("frames", ()))


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

    def differs(self, row: Row, difference: str, times: int = 1) -> None:
        """Add a difference, as often as there are blocks that have it."""
        self.differences += [f"{row.where}: {difference}"] * times

    @property
    def line(self) -> str:
        return f"blocks={self.blocks} matched={self.matched} unexplained={self.unexplained}"

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "unexplained": self.unexplained,
            "first_difference": self.differences[0] if self.differences else None,
        }


class Stream:
    """The frames of a capture so far. ``payloads`` are by sequence number."""

    def __init__(self, report: ReplayReport, decode: Callable[[bytes], Any]) -> None:
        self.report, self._decode = report, decode
        self.payloads: dict[int, bytes] = {}
        self._last: int | None = None

    def events(self, row: Row, frame: Frame) -> Sequence[Any]:
        """Return a frame's events. Batches that are missing before it, or that cannot be read, are differences."""
        if self._last is not None and frame.seq != self._last + 1:
            missing = frame.seq - self._last - 1
            self.report.differs(row, f"batch {frame.seq} follows {self._last}: {missing} are missing")
        self._last = frame.seq
        self.payloads[frame.seq] = frame.payload
        try:
            events: Sequence[Any] = self._decode(frame.payload).events
        except EventError as error:
            self.report.differs(row, f"a batch cannot be read: {error}")
            return ()
        return events


def load_model(folder: Path, limits: ProcessorLimits | None = None) -> tuple[Family, Prompter]:
    """Return what renders a folder's prompts under processor options. Raises :class:`CaptureError`."""
    try:
        family = load_family(folder, limits)
        if family is None:
            raise CaptureError(f"--model {folder} is of no family that is modelled")
        return family, Prompter.load(folder, family=family)
    except (ModelFolderError, OSError) as error:
        raise CaptureError(f"--model {folder}: {error}") from error
