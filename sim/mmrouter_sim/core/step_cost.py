"""Cost model: the duration of a simulated step.

    seconds = (prefill tokens / prefill rate + visual tokens * encode seconds + decode seconds if anything decodes)
              * (1 + uniform(-jitter, jitter)) / speed

Hand-over of KV blocks or embeddings and image processing take ``tokens * seconds / speed``, in parallel to the steps.
Copying a processed image takes its real time.

Decoding is bound by memory bandwidth, so a step of one sequence and a step of many cost the same; prefill and
encoding are bound by arithmetic and add up.
"""

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """Rates of one simulated accelerator. With the defaults, a request of the demo takes some tens of milliseconds."""

    prefill_rate: float = 20_000.0  # tokens per second
    encode_seconds: float = 20e-6  # per visual token
    decode_seconds: float = 2e-3  # per step that decodes
    kv_seconds: float = 3e-6  # seconds per token whose KV blocks are copied from another engine: 28 KB at 10 GB/s
    embedding_seconds: float = 5e-7  # seconds per visual token whose embedding is copied
    process_seconds: float = 1e-6  # seconds per visual token that the API server processes
    jitter: float = 0.1  # half-width of the uniform factor, as a share
    speed: float = 1.0  # divides every time

    def __post_init__(self) -> None:
        if self.prefill_rate <= 0 or self.speed <= 0:
            raise ValueError("prefill rate and speed must be above 0")
        seconds = (self.kv_seconds, self.embedding_seconds, self.process_seconds)
        if min(self.encode_seconds, self.decode_seconds, *seconds) < 0 or not 0 <= self.jitter < 1:
            raise ValueError("times must not be negative and jitter must be in [0, 1)")

    def seconds(self, *, prefill: int, visual: int, decoding: bool, rng: random.Random) -> float:
        """Return the duration of a step over ``prefill`` prompt tokens and ``visual`` visual tokens."""
        work = prefill / self.prefill_rate + visual * self.encode_seconds + (self.decode_seconds if decoding else 0.0)
        return work * (1 + rng.uniform(-self.jitter, self.jitter)) / self.speed
