"""Decision traces: a bounded ring of what was decided and why, by request id (docs/cli.md, `mmrouter explain`)."""

import time
from array import array
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any

from mmrouter_lib.media_identity import to_wire
from mmrouter_router.explain.evidence import Expected, Verdict, expected_of
from mmrouter_router.explain.rendering import Rendering
from mmrouter_router.media import Media
from mmrouter_router.request.prepare import Prepared, ResolvedImage
from mmrouter_router.scheduling.placer import Decision

RING = 1000
RING_TOKENS = 16_000_000
"""Prompt tokens of all kept traces, up to about 10 bytes each: a ring of the longest prompts is a shorter one."""
TOKEN_BYTES = 10
KEYS_SHOWN = 4096
KEPT_BYTES = 256 * 1024
"""A body that nobody looked at is kept, for whoever asks for its decision, where it is no longer than this."""


@dataclass(slots=True)
class Unseen:
    """What a request is kept as whose prompt nobody has predicted; its images' bytes are not kept."""

    raw: bytes  # its body, empty where that is too long
    images: tuple[ResolvedImage, ...]
    salt: str | None


@dataclass(slots=True)
class Trace:
    """One decision and what came of it. Rendered when somebody asks: few are looked at, and a request must not pay."""

    request_id: str
    decision: Decision
    prompt_tokens: int
    keys: "array[int]"
    images: list[dict[str, Any]]  # their bytes are not kept
    expected: Expected | None = None  # what the engine should hold after it
    parity: Verdict | None = None  # and whether it did, where somebody looked
    rendering: Rendering | None = None  # what a renderer made of the same request, where one was asked
    identity: tuple[str, str] = ("uuid", "the engine names images as we do")
    """Where the images' identities come from for the chosen worker, and why."""
    attempts: list[dict[str, Any]] = field(default_factory=list)
    chain: list[dict[str, Any]] = field(default_factory=list)
    """What was done before the answer, or gone without: one entry per stage and attempt."""
    travelled: list[dict[str, Any]] = field(default_factory=list)
    """How images reached engines, where they are handed over: one entry per image, engine and attempt."""
    answers: str = ""
    """The engine that answers, where stages came before it."""
    form: str = "whole"
    """The stages that the pods could serve when it was placed (``mmrouter_router.scheduling.pipeline_form``)."""
    degraded: tuple[str, ...] = ()
    """Pools that it was served without, because none of their pods could take work."""
    unseen: "Unseen | None" = None
    """The decision was made without its prompt: what it can be predicted from."""

    @property
    def weight(self) -> int:
        """How much it keeps, in prompt tokens."""
        return self.prompt_tokens + (len(self.unseen.raw) // TOKEN_BYTES if self.unseen is not None else 0)

    def tried(self, decision: Decision, outcome: str) -> None:
        """Note where the request was sent and what came of it."""
        self.attempts.append({"worker": decision.target.worker.member.name, "outcome": outcome, "at": time.time()})

    def as_json(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        decision = self.decision
        target, winner = decision.target, decision.choice.winner
        return {
            "request_id": self.request_id,
            "at": decision.at,
            "exactness": decision.exactness,
            "reasons": list(decision.reasons),
            "policy": decision.policy,
            "worker": winner.name,
            "worker_id": winner.id,
            "pool": winner.pool,
            "rank": target.rank,
            "block_size": target.block_size,
            "prompt_tokens": self.prompt_tokens,
            "predicted": "before" if self.unseen is None else "no",
            "blocks": winner.blocks,
            "overlap": winner.overlap,
            "why": decision.choice.reason,
            "candidates": [
                {
                    "worker": score.candidate.name,
                    "id": score.candidate.id,
                    "overlap": score.candidate.overlap,
                    "coming": score.candidate.coming,
                    "held": score.candidate.held,
                    "scored": score.candidate.scored,
                    "terms": score.terms,
                    "cost": score.cost,
                }
                for score in decision.choice.scores
            ],
            "identity": {"provider": self.identity[0], "why": self.identity[1]},
            "images": self.images,
            "keys": [f"{key:016x}" for key in self.keys[:KEYS_SHOWN]],
            "attempts": self.attempts,
            "form": self.form,
            "chain": self.chain,
            "travelled": self.travelled,
            "answers": self.answers or winner.name,
            "degraded": list(self.degraded),
        }


@dataclass(slots=True)
class Counts:
    """Of this process's decisions; they begin at 0 with it and only grow."""

    decisions: int = 0
    exact: int = 0
    prompt_blocks: int = 0
    hit_blocks: int = 0

    def add(self, *, exact: bool, prompt_blocks: int, hit_blocks: int) -> None:
        """Count one decision: whether it was exact, its prompt's complete blocks, and those that the worker held."""
        self.decisions += 1
        self.exact += exact
        self.prompt_blocks += prompt_blocks
        self.hit_blocks += hit_blocks


class Decisions:
    """The last :data:`RING` traces, fewer where their prompts are longer than :data:`RING_TOKENS` together."""

    def __init__(self, size: int = RING, tokens: int = RING_TOKENS) -> None:
        self._size, self._room = size, tokens
        self._traces: OrderedDict[str, Trace] = OrderedDict()

    def add(self, request_id: str, trace: Trace) -> None:
        """Keep a trace, at least this one; the oldest ones leave."""
        self._traces[request_id] = trace
        self._room -= trace.weight
        while len(self._traces) > self._size or (self._room < 0 and len(self._traces) > 1):
            _, gone = self._traces.popitem(last=False)
            self._room += gone.weight

    def get(self, request_id: str) -> Trace | None:
        """The trace of a request that this router answered, while it is kept."""
        return self._traces.get(request_id)

    def latest(self, count: int) -> list[Trace]:
        """The newest traces, newest first."""
        return [trace for _, trace in zip(range(count), reversed(self._traces.values()), strict=False)]


def trace_of(request_id: str, prepared: Prepared, decision: Decision) -> Trace:
    """Keep what explains a decision."""
    spans = repeat(None, len(prepared.images)) if prepared.unseen else prepared.spans
    images = [
        {
            "param": image.param,
            "identity": to_wire(image.identity),
            "width": image.width,
            "height": image.height,
            "tokens": image.tokens,
            "bytes": len(image.media.data),
            "offset": span.offset if span is not None else None,
            "unresolved": image.unresolved,
        }
        for image, span in zip(prepared.images, spans, strict=False)
    ]
    keys = prepared.keys(decision.target.block_size, decision.target.worker.scope)
    expected = expected_of(prepared, decision.target.worker, decision.target.rank, decision.target.block_size)
    trace = Trace(request_id, decision, len(prepared.ids), keys, images, expected=expected)
    scope = decision.target.worker.scope
    if prepared.unseen:
        source = prepared.request.source
        kept = bytes(source) if len(source) <= KEPT_BYTES else b""
        trace.unseen = Unseen(kept, tuple(_without_bytes(image) for image in prepared.images), prepared.salt)
    if scope is not None and prepared.sentinels is not None:
        trace.identity = prepared.sentinels.provider(scope)
    return trace


def seen_afterwards(trace: Trace, prepared: Prepared) -> dict[str, Any]:
    """Return an unseen decision with its prompt, which is predicted now; what was held then is not known any more."""
    target = trace.decision.target
    keys = prepared.keys(target.block_size, target.worker.scope)
    offsets: list[int | None] = [span.offset for span in prepared.spans] or [None] * len(trace.images)
    return {
        **trace.as_json(),
        "predicted": "afterwards",
        "prompt_tokens": len(prepared.ids),
        "blocks": len(keys),
        "keys": [f"{key:016x}" for key in keys[:KEYS_SHOWN]],
        "images": [{**image, "offset": at} for image, at in zip(trace.images, offsets, strict=True)],
    }


def _without_bytes(image: ResolvedImage) -> ResolvedImage:
    return replace(image, media=Media(b"", image.media.mime, image.media.source))
