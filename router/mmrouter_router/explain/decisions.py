"""Log of recent routing decisions with their reasons, by request id (docs/cli.md, `mmrouter explain`)."""

import time
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice, repeat
from typing import Any

from mmrouter_lib.media_identity import to_wire
from mmrouter_router.core.request_ids import without_prefix
from mmrouter_router.explain.differences import RenderVerdict
from mmrouter_router.explain.parity_check import ExpectedBlocks, Verdict, expected_blocks
from mmrouter_router.media.content import Media
from mmrouter_router.request.prepared import Prepared, ResolvedImage
from mmrouter_router.scheduling.placer import Decision

MAX_TRACES = 1000
MAX_TOKENS = 16_000_000  # prompt tokens of all traces, at about 10 bytes each
TOKEN_BYTES = 10
KEYS_SHOWN = 4096
CANDIDATE_SHOWN = ("id", "overlap", "unproved", "tier", "coming", "held", "scored")
BODY_BYTES = 256 * 1024  # the largest body of an unpredicted request that is kept to predict it on demand


@dataclass(slots=True)
class UnpredictedRequest:
    """A request that was routed without a predicted prompt, from which the prompt can be predicted on demand."""

    endpoint: str
    raw: bytes  # its body, empty above BODY_BYTES
    images: tuple[ResolvedImage, ...]
    salt: str | None


@dataclass(slots=True)
class DecisionTrace:
    """One decision and the outcome of its request. Rendered on demand, because few traces are read.

    ``identity``: provider of the images' identities for the chosen worker, and the reason. ``stages``: one entry per
    stage and attempt before the answer. ``transfers``: one per handed over image, engine and attempt. ``answers``: the
    engine that answers, where stages came before it. ``degraded``: the pools that the pipeline form omits.
    ``stream``: how a stream is continued where its engine ends, or why not.
    ``round_robin``: blocks that round robin would have found, ``None`` where it was not compared (docs/ui.md).
    """

    request_id: str
    decision: Decision
    prompt_tokens: int
    keys: "array[int]"
    images: list[dict[str, Any]]  # without their bytes
    other_keys: "tuple[array[int], ...]" = ()  # of a completion's prompts behind the first one
    expected: ExpectedBlocks | None = None  # blocks that the engine should hold after it
    parity: Verdict | None = None  # of a sampled request
    rendering: RenderVerdict | None = None  # of a request that a renderer rendered as well
    identity: tuple[str, str] = ("uuid", "the engine uses the router's image identities")
    attempts: list[dict[str, Any]] = field(default_factory=list)
    stages: list[dict[str, Any]] = field(default_factory=list)
    transfers: list[dict[str, Any]] = field(default_factory=list)
    answers: str = ""
    stream: str = ""
    form: str = "whole"
    degraded: tuple[str, ...] = ()
    unpredicted: UnpredictedRequest | None = None
    round_robin: int | None = None

    @property
    def weight(self) -> int:
        """Memory that it holds, in prompt tokens."""
        return self.prompt_tokens + (len(self.unpredicted.raw) // TOKEN_BYTES if self.unpredicted is not None else 0)

    def add_attempt(self, decision: Decision, outcome: str) -> None:
        self.attempts.append({"worker": decision.target.worker.member.name, "outcome": outcome, "at": time.time()})

    def as_json(self) -> dict[str, Any]:
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
            "predicted": "before" if self.unpredicted is None else "no",
            "blocks": winner.blocks,
            "overlap": winner.overlap,
            "unproved": winner.unproved,
            "tier": winner.tier,
            "regret": decision.choice.regret,
            "why": decision.choice.reason,
            "candidates": [
                {
                    "worker": score.candidate.name,
                    **{name: getattr(score.candidate, name) for name in CANDIDATE_SHOWN},
                    "terms": score.terms,
                    "cost": score.cost,
                }
                for score in decision.choice.scores
            ],
            "identity": {"provider": self.identity[0], "why": self.identity[1]},
            "images": self.images,
            "keys": _shown(self.keys, self.other_keys),
            "attempts": self.attempts,
            "stream": self.stream,
            "form": self.form,
            "chain": self.stages,
            "travelled": self.transfers,
            "answers": self.answers or winner.name,
            "degraded": list(self.degraded),
        }


class DecisionLog:
    """The last :data:`MAX_TRACES` traces, fewer where their prompts exceed :data:`MAX_TOKENS` together."""

    def __init__(self, size: int = MAX_TRACES, tokens: int = MAX_TOKENS) -> None:
        self._size, self._free_tokens = size, tokens
        self._traces: OrderedDict[str, DecisionTrace] = OrderedDict()
        self._names: OrderedDict[str, str] = OrderedDict()  # a client's name of its request -> id of the newest one
        self.added = 0  # traces since the process started

    def __len__(self) -> int:
        return len(self._traces)

    def add(self, request_id: str, trace: DecisionTrace, name: str = "") -> None:
        """Add a trace; ``name``: the client's name of its request, which need not be unique."""
        if name:
            self._names[name] = request_id
            self._names.move_to_end(name)
            if len(self._names) > self._size:
                self._names.popitem(last=False)
        replaced = self._traces.pop(request_id, None)  # the same request, which has moved to another engine
        self._traces[request_id] = trace
        self.added += 1
        self._free_tokens -= trace.weight - (replaced.weight if replaced is not None else 0)
        while len(self._traces) > self._size or (self._free_tokens < 0 and len(self._traces) > 1):
            _, evicted = self._traces.popitem(last=False)
            self._free_tokens += evicted.weight

    def get(self, name: str) -> DecisionTrace | None:
        """Return the trace of a request by its id, its engine's answer id, or the client's name of it."""
        return self._traces.get(without_prefix(name)) or self._traces.get(self._names.get(name, ""))

    def latest(self, count: int) -> list[DecisionTrace]:
        return [trace for _, trace in zip(range(count), reversed(self._traces.values()), strict=False)]


def _shown(keys: "array[int]", others: "Iterable[array[int]]") -> list[str]:
    """Return the keys of all prompts, up to a limit."""
    return [f"{key:016x}" for key in islice(chain(keys, *others), KEYS_SHOWN)]


def trace_of(request_id: str, prepared: Prepared, decision: Decision) -> DecisionTrace:
    spans = repeat(None, len(prepared.images)) if prepared.unseen else prepared.spans
    images = [
        {
            **{name: getattr(image, name) for name in ("param", "width", "height", "tokens", "unresolved")},
            "identity": to_wire(image.identity),
            "bytes": len(image.media.data),
            "offset": span.offset if span is not None else None,
        }
        for image, span in zip(prepared.images, spans, strict=False)
    ]
    target, scope = decision.target, decision.target.worker.scope
    keys = prepared.keys(*target.key_form)
    expected = expected_blocks(prepared, target)
    others = prepared.other_keys(*target.key_form)
    trace = DecisionTrace(request_id, decision, prepared.tokens, keys, images, others, expected=expected)
    if prepared.unseen:
        source = prepared.request.source
        raw = bytes(source) if len(source) <= BODY_BYTES else b""
        bare = [replace(i, media=Media(b"", i.media.mime, i.media.source)) for i in prepared.images]
        trace.unpredicted = UnpredictedRequest(prepared.request.endpoint, raw, tuple(bare), prepared.salt)
    if scope is not None and prepared.sentinels is not None:
        trace.identity = prepared.sentinels.provider(scope)
    return trace


def predicted_afterwards(trace: DecisionTrace, prepared: Prepared) -> dict[str, Any]:
    """Return the JSON of an unpredicted decision with the prompt predicted now; past cache contents are unknown."""
    target = trace.decision.target
    keys, *others = prepared.all_keys(*target.key_form)
    offsets: list[int | None] = [span.offset for span in prepared.spans] or [None] * len(trace.images)
    return {
        **trace.as_json(),
        "predicted": "afterwards",
        "prompt_tokens": prepared.tokens,
        "blocks": len(keys) + sum(map(len, others)),
        "keys": _shown(keys, others),
        "images": [{**image, "offset": at} for image, at in zip(trace.images, offsets, strict=False)],
    }
