"""What is asked of an endpoint and what came of it, as plain values; a result file is one :class:`Result` as JSON."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

Events = Literal["on", "off", "unknown"]


class BenchError(Exception):
    """The load cannot be made, sent or shown; the message says why."""


class Words(NamedTuple):
    """Text of about so many tokens; equal names begin with equal words."""

    name: str
    tokens: int


class Shown(NamedTuple):
    """A picture; equal names of one size are equal bytes."""

    name: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a user says, the answer as it stands in the turns after it, and the seconds to wait before asking."""

    parts: tuple[Words | Shown, ...]
    answer: Words
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under one system prompt (none where empty); the first one is due ``at`` seconds after the start."""

    at: float
    system: tuple[Words, ...]
    turns: tuple[Turn, ...]


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides what is sent and when, but for the words themselves: equal loads can be compared.

    ``trace``: digest of the file that is played, empty for the synthetic mix. One of ``rate`` (requests per second)
    and ``concurrency`` (conversations at a time) is given; neither: as the trace has it. What a trace says itself
    stands here as 0.
    """

    kind: Literal["synthetic", "mooncake", "statistics"] = "synthetic"
    trace: str = ""
    seed: int = 1
    requests: int = 200
    rate: float | None = None
    concurrency: int | None = None
    turns: float = 3.0
    think: float = 0.0
    system_prompts: int = 4
    system_tokens: int = 400
    text_tokens: int = 120
    output_tokens: int = 64
    image_share: float = 0.5
    image_reuse: float = 0.5
    image_width: int = 448
    image_height: int = 448
    longest: int | None = None
    ignore_eos: bool = False

    @property
    def paced(self) -> bool:
        """Whether requests go out by the clock, not when answers come."""
        return self.concurrency is None


class Answer(msgspec.Struct, gc=False):
    """What one request came to; times in seconds, ``started`` since the run began.

    ``late``: after it was due, ``None`` where it was due at no time of its own.
    ``first``, ``last``, ``total``: until the first token, the last one, and the end.
    ``error``: its kind, empty for a whole answer. ``cached``: prompt tokens from the engine's cache, ``None`` where the
    endpoint does not say.
    ``overlap``: tokens that an mmrouter found cached before it sent the request, ``None`` where it does not say.
    """

    started: float
    late: float | None = None
    first: float = 0.0
    last: float = 0.0
    total: float = 0.0
    tokens_seen: int = 0
    prompt: int | None = None
    completion: int | None = None
    cached: int | None = None
    error: str = ""
    message: str = ""
    routed: bool = False
    exactness: str = ""
    overlap: int | None = None
    worker: str = ""


class Spread(msgspec.Struct, frozen=True):
    """How values lie; seconds. ``None``: a percentile that needs more values than there are."""

    count: int
    mean: float
    p50: float
    p90: float | None
    p95: float | None
    p99: float | None
    max: float


class Failure(msgspec.Struct, frozen=True):
    """How often a kind of error came, and what the first one said."""

    count: int
    first: str


class Routing(msgspec.Struct, frozen=True):
    """What an mmrouter said of its decisions. ``overlap``: share of prompt tokens that it found cached."""

    events: Events
    why: str
    decisions: dict[str, int]
    overlap: float | None
    workers: dict[str, int]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One answer in the plots."""

    started: float
    first: float
    total: float
    prompt: int | None
    cached: int | None


class Result(msgspec.Struct, frozen=True):
    """One run. Times are seconds; ``None``: could not be measured.

    ``hit_ratio``: prompt tokens from caches over prompt tokens, ratio of sums; without one ``hit_unknown`` says why.
    ``late_share``: of the requests that were due at a time, those that went out late; ``latest``: by how much at most.
    ``lag``: how late the client's own timers were,
    p99. ``routing``: only of an mmrouter. ``unanswered``: under way when the run was interrupted.
    """

    url: str
    model: str
    policy: str
    began: str
    salt: str
    load: Load
    left_out: int
    tokens_per_word: float
    seconds: float
    interrupted: bool
    sent: int
    answered: int
    unanswered: int
    failures: dict[str, Failure]
    prompt_tokens: int
    completion_tokens: int
    hit_ratio: float | None
    hit_unknown: str
    first_token: Spread | None
    between_tokens: Spread | None
    per_token: Spread | None
    end_to_end: Spread | None
    late_share: float
    lag: float
    routing: Routing | None
    rows: list[Row]
    gaps: list[float]
    """Quantiles of the time between tokens: 101, from the least to the largest; empty without any."""
    version: Literal[1] = 1
    latest: float = 0.0

    @property
    def failed(self) -> int:
        """Number of requests without a whole answer."""
        return sum(failure.count for failure in self.failures.values())
