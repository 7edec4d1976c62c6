"""What a campaign tests: targets, each one kind of input and the properties that must hold for all of them.

An input is bytes. A target draws inputs from a seeded generator and checks them one at a time; :func:`run` does both
and counts. A check returns the *outcome*, a short label such as an error code, or raises: :class:`BrokenPropertyError`,
or anything else, which counts as a crash. An input with a new outcome is kept, and later inputs are drawn from the kept
ones, so an outcome that is found once is searched further.
"""

import random
import time
import traceback
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from campaign.allocated import allocated
from campaign.mutation import mutated

Kind = Literal["crash", "hang", "5xx", "difference"]
MAX_KEPT = 2_000  # inputs from which others are drawn, and outcomes with their shortest input
MAX_FAILURES = 20  # inputs that a run keeps of those that failed
MIN_SAMPLES = 20
FLAT_BYTES = 24 * 1024**2
"""Growth of a worker's allocated bytes from a run's third quarter to its last that counts as flat, such as kept inputs.
"""


class BrokenPropertyError(AssertionError):
    """A property does not hold: an answer of 500 to 599, or a result that differs from the reference."""

    def __init__(self, message: str, kind: Kind = "difference") -> None:
        super().__init__(message)
        self.kind: Kind = kind


class Target(ABC):
    """One kind of input. A subclass may start what its check needs in ``__enter__`` and end it in ``__exit__``."""

    name: ClassVar[str]
    short: ClassVar[int]  # inputs of the short form, which the gate runs: about a second; 0: the gate does not run it
    whole_run: ClassVar[bool] = False  # whether it runs beside the others for all of the campaign's time
    in_process: ClassVar[bool] = True  # whether the product runs in the target's process, whose memory is judged then
    limit_s: ClassVar[float] = 60.0  # an input that takes longer is a hang, without the time it waited for a CPU
    words: ClassVar[Sequence[bytes]] = ()  # pieces that a mutation inserts
    spent_s: float | None = None  # CPU seconds of the last input, None: all of its check

    def __init__(self) -> None:
        self.totals: Counter[str] = Counter()  # further figures of all inputs so far, for the campaign's table
        self.largest: dict[str, float] = {}

    @classmethod
    def missing(cls) -> str:
        """Return what this machine lacks for the target; empty: nothing."""
        return ""

    @classmethod
    def left_out(cls) -> str:
        """Return which inputs are not drawn on this machine, and why; empty: all are."""
        return ""

    def keep_largest(self, **figures: float) -> None:
        for name, value in figures.items():
            self.largest[name] = max(value, self.largest.get(name, value))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def seeds(self) -> list[bytes]:
        """Return inputs from which the first ones are drawn."""
        return []

    def draw(self, source: random.Random, kept: Sequence[bytes]) -> bytes:
        """Return the next input. It depends on the arguments only, so that a run can be repeated by its seed."""
        return mutated(source, kept, self.words)

    @contextmanager
    def product(self) -> Iterator[None]:
        """Count only the block's time as the input's, where a check has a slower reference beside it."""
        began = time.process_time()
        try:
            yield
        finally:
            self.spent_s = time.process_time() - began + (self.spent_s or 0.0)

    @abstractmethod
    def check(self, data: bytes) -> str:
        """Return the outcome of an input. Raises :class:`BrokenPropertyError`; every other exception is a crash."""


@dataclass(frozen=True)
class Failure:
    """An input for which a property is broken."""

    kind: Kind
    message: str
    data: bytes


@dataclass
class Counts:
    """What a run saw. ``worst_s``: CPU seconds of the slowest input; ``memory``: (inputs, allocated bytes) over time;
    ``totals``, ``largest``: further figures of the target.
    """

    inputs: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)
    shortest: dict[str, bytes] = field(default_factory=dict)
    worst_s: float = 0.0
    slowest: bytes = b""
    memory: list[tuple[int, int]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    largest: dict[str, float] = field(default_factory=dict)

    def fail(self, failure: Failure) -> None:
        """Count a failure; keep the input of the first ones of each message."""
        self.kinds[failure.kind] += 1
        if len(self.failures) < MAX_FAILURES and all(failure.message != known.message for known in self.failures):
            self.failures.append(failure)

    def add(self, other: "Counts") -> None:
        """Add a later part of the same run, which another process made."""
        self.inputs += other.inputs
        self.outcomes += other.outcomes
        for failure in other.failures:
            self.fail(failure)
        self.kinds = self.kinds + other.kinds - Counter(failure.kind for failure in other.failures)
        for outcome, data in other.shortest.items():
            if len(data) < len(self.shortest.get(outcome, data + b".")):
                self.shortest[outcome] = data
        if other.worst_s > self.worst_s:
            self.worst_s, self.slowest = other.worst_s, other.slowest
        self.memory = other.memory or self.memory
        self.totals += other.totals
        for name, value in other.largest.items():
            self.largest[name] = max(value, self.largest.get(name, value))

    @property
    def growth(self) -> int:
        """Bytes by which the process's floor grew from the third quarter of the run to the last.

        The floor is the smallest sample: a sample may contain what is still made of an input of 64 MiB, a leak is in
        all of them. 0 with few samples, which include warm-up.
        """
        if len(self.memory) < MIN_SAMPLES:
            return 0
        middle, last = self.memory[-1][0] / 2, self.memory[-1][0] * 3 / 4
        third = min(size for inputs, size in self.memory if middle <= inputs < last)
        return min(size for inputs, size in self.memory if inputs >= last) - third


def run(
    target: Target,
    seed: str,
    corpus: Sequence[bytes],
    go_on: Callable[[Counts], bool],
    before: Callable[[bytes], None] = lambda data: None,
) -> Counts:
    """Check the corpus, then drawn inputs while ``go_on``. ``before`` gets each input before it is checked."""
    counts, source = Counts(totals=target.totals, largest=target.largest), random.Random(f"{seed}/{target.name}")
    kept = [*target.seeds(), *corpus]
    every = 1
    with target:
        for data in kept.copy():
            before(data)
            check(target, data, counts)
        while go_on(counts):
            data = target.draw(source, kept)
            before(data)
            if check(target, data, counts) and len(kept) < MAX_KEPT:
                kept.append(data)
            if counts.inputs % every == 0:
                counts.memory.append((counts.inputs, allocated()))
                if len(counts.memory) == 100:
                    counts.memory, every = counts.memory[1::2], 2 * every
    return counts


def check(target: Target, data: bytes, counts: Counts) -> bool:
    """Check one input; return whether its outcome is new."""
    began, target.spent_s = time.process_time(), None
    try:
        outcome = target.check(data)
    except Exception as error:  # whatever an input raises is the finding, and the next input is checked
        kind: Kind = error.kind if isinstance(error, BrokenPropertyError) else "crash"
        outcome = f"{kind}: {type(error).__name__}"
        where = "" if isinstance(error, BrokenPropertyError) else "".join(traceback.format_exception(error)[-3:])
        counts.fail(Failure(kind, f"{error}\n{where}".strip(), data))
    spent = time.process_time() - began if target.spent_s is None else target.spent_s
    if spent > counts.worst_s:
        counts.worst_s, counts.slowest = spent, data
    counts.inputs += 1
    counts.outcomes[outcome] += 1
    known = counts.shortest.get(outcome)
    if len(counts.shortest) < MAX_KEPT if known is None else len(data) < len(known):
        counts.shortest[outcome] = data
    return known is None
