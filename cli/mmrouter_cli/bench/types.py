"""Values of a bench run: the load, its conversations, answers and the result. A result file is a :class:`Result`."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

EventState = Literal["on", "off", "unknown"]


class BenchError(Exception):
    """The load cannot be made, sent or shown; the message says why."""


class Words(NamedTuple):
    """Text of about ``tokens`` tokens; texts of one name start with the same words."""

    name: str
    tokens: int


class Picture(NamedTuple):
    """An image; equal names and sizes are equal bytes."""

    name: str
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message, the answer that later turns repeat, and the seconds of pause before it is sent."""

    parts: tuple[Words | Picture, ...]
    answer: Words
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns under a system prompt (may be empty); the first turn is due ``at`` seconds after the start."""

    at: float
    system: tuple[Words, ...]
    turns: tuple[Turn, ...]


class LoadSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decides what is sent and when, except the words: runs of equal specs are comparable.

    ``trace``: digest of the file that is played, empty for the synthetic mix. At most one of ``rate`` (requests per
    second) and ``concurrency`` (conversations at a time) is set; without both a trace's own times hold. Fields that a
    trace determines are 0.
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
        """Whether requests are sent at times of their own instead of after answers."""
        return self.concurrency is None


class Answer(msgspec.Struct, gc=False):
    """Outcome of one request; times in seconds, ``started`` since the run began.

    ``late``: after its due time, ``None`` without one. ``first``, ``last``, ``total``: until the first token, the last
    one, and the end. ``error``: the kind of failure, empty for a complete answer. ``cached``: prompt tokens from the
    engine's cache. ``overlap``: tokens that an mmrouter found cached before sending. ``images``: in the prompt.
    ``None``: not reported.
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
    images: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of the answer: as the endpoint counts them, else as many as events with text came."""
        return self.completion if self.completion is not None else self.tokens_seen

    @property
    def per_token(self) -> float | None:
        """Seconds per token after the first one, ``None`` of an answer of one token."""
        several = self.tokens > 1 and self.tokens_seen > 1
        return (self.last - self.first) / (self.tokens - 1) if several else None


class Spread(msgspec.Struct, frozen=True):
    """Distribution of values in seconds; ``None``: a percentile that needs more values."""

    count: int
    mean: float
    p50: float
    p90: float | None
    p95: float | None
    p99: float | None
    max: float


class Failure(msgspec.Struct, frozen=True):
    """Number of failures of one kind, and the message of the first."""

    count: int
    first: str


class Routing(msgspec.Struct, frozen=True):
    """What an mmrouter reported about its decisions. ``overlap``: share of prompt tokens that it found cached."""

    events: EventState
    why: str
    decisions: dict[str, int]
    overlap: float | None
    workers: dict[str, int]


class EncoderWork(msgspec.Struct, frozen=True):
    """What an encoder did in a run, as the frontends saw it. ``busy``: share of the run in which it had an image."""

    images: int
    tokens: int
    busy: float


class AnswerRow(msgspec.Struct, frozen=True, array_like=True):
    """An :class:`Answer` in a result. Earlier releases wrote the first five values."""

    started: float
    first: float
    total: float
    prompt: int | None
    cached: int | None
    per_token: float | None = None
    worker: str = ""
    images: int | None = None


class Result(msgspec.Struct, frozen=True):
    """One run; times in seconds, ``None`` where unknown.

    ``hit_ratio``: cached prompt tokens over prompt tokens, a ratio of sums; ``hit_unknown`` says why it is missing.
    ``late_share`` and ``latest``: of the requests with a due time, how many were sent late and by how much at most.
    ``lag``: p99 of the delay of the client's own timers. ``routing``: for an mmrouter only. ``unanswered``: in flight
    when the run was interrupted. ``gaps``: 101 quantiles of the time between tokens, empty without any.
    ``encoder_mode``: instead of the deployment's; ``encoders``: of an mmrouter with encoders and a known control API.
    """

    url: str
    model: str
    policy: str
    began: str
    salt: str
    load: LoadSpec
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
    rows: list[AnswerRow]
    gaps: list[float]
    version: Literal[1] = 1
    latest: float = 0.0
    encoder_mode: str = ""
    encoders: dict[str, EncoderWork] = {}

    @property
    def failed(self) -> int:
        return sum(failure.count for failure in self.failures.values())
