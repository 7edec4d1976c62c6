"""Pipeline form of a request: which of encode, prefill and decode run, by the pods that are available. Pure.

A form that needs a pool without an available pod degrades to the next simpler form that still answers.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_router.core.linear_cost import Line, Rate

SHORT_TOKENS: Final = 512
"""With fewer tokens left to compute, one step of any accelerator, a prompt is computed where it is decoded.

A transfer costs a round trip to two engines. Above the bound the measured times decide."""
EXPLORE: Final = 16  # explore: 1 in 16 requests takes the costlier path so that both stay measured
ENOUGH: Final = 8  # measurements of each path before they are compared

Missing = Literal["no_encoder", "no_prefill", "no_decode", "no_pair"]


@dataclass(frozen=True, slots=True)
class PipelineForm:
    """The stages of a request. ``answers``: the roles of which one engine answers the client; may be empty.

    ``degraded``: pools that this form omits, because none of their pods can take work.
    ``paired``: the prefill and the answering engine get the request at once, and neither works alone.
    """

    answers: frozenset[str]
    prefills: bool = False
    encodes: bool = False
    degraded: tuple[Missing, ...] = ()
    paired: bool = False

    @property
    def staged(self) -> bool:
        """Whether a stage runs before an engine answers."""
        return self.prefills or self.encodes

    @property
    def name(self) -> str:
        """The stages in order, as in ``encode-prefill-decode``; ``whole`` for one engine that does all."""
        answer = "decode" if self.prefills else "whole"
        return "-".join([*(["encode"] if self.encodes else []), *(["prefill"] if self.prefills else []), answer])


def choose_form(engine: EngineType, pools: Collection[str], able: Collection[str]) -> PipelineForm:
    """Return the fullest form that the pods can serve now.

    ``pools``: roles of the deployment. ``able``: roles with a pod that can take work. A vLLM engine of either role
    serves a request whole when its partner is away; SGLang answers only in pairs
    (docs/engine-facts/sglang.md#prefill-decode).
    """
    capabilities = adapter(engine)
    alone = not capabilities.pairs_prefill_and_decode
    degraded: list[Missing] = []
    prefill, decode = "prefill" in able, "decode" in able
    pair = prefill and decode
    answers: set[str] = {"worker"} & set(able)
    if "decode" in pools:
        if pair or (decode and alone):
            answers.add("decode")
        elif prefill and alone and not answers:
            answers.add("prefill")
        if not alone and not pair:
            degraded.append("no_pair")
        elif not decode:
            degraded.append("no_decode")
        elif not prefill:
            degraded.append("no_prefill")
    prefills, encodes = pair and "decode" in answers, False
    if "encoder" in pools and "encoder" not in able:
        degraded.append("no_encoder")
    if "encoder" in pools and not capabilities.asks_encoders_itself:
        # A decode engine takes blocks and no embeddings.
        encodes = "encoder" in able and (prefills or bool(answers - {"decode"}))
    return PipelineForm(frozenset(answers), prefills, encodes, tuple(degraded), paired=prefills and not alone)


def canary_applies(role: str) -> bool:
    """Whether the canary verifies pods of a role: their engines answer chats, of SGLang some of them in pairs."""
    return role in ("worker", "prefill", "decode")


class OffloadPolicy:
    """Decides whether to compute elsewhere, by a bound in tokens and the measured time of both paths.

    Seconds are from the decision to the answer's first byte; tokens are those that remain to be computed.
    """

    def __init__(self, short_tokens: int = SHORT_TOKENS) -> None:
        self.short_tokens = short_tokens
        first = Line(0.0, 1e-4)
        self.local, self.remote = Rate(first), Rate(first)
        self._compared = 0

    def reason_local(self, remaining: int) -> str:
        """Return why to compute locally: ``short``, ``slower``, or empty for remotely.

        ``remaining``: tokens of the prompt that the answering engine does not hold. A bound of 0 disables comparisons.
        """
        if self.short_tokens == 0:
            return ""
        if remaining < self.short_tokens:
            return "short"
        if min(self.local.measured, self.remote.measured) < ENOUGH:
            # Alternate until both paths are measured, remote first: the pools exist for it.
            return "slower" if self.local.measured < self.remote.measured - 1 else ""
        local = self.local.line.seconds(remaining) < self.remote.line.seconds(remaining)
        self._compared += 1
        if self._compared % EXPLORE == 0:
            local = not local
        return "slower" if local else ""

    def observe(self, remaining: int, seconds: float, *, remote: bool) -> None:
        """Record a time to first byte. Short prompts are ignored: they predict nothing about long ones."""
        if remaining >= self.short_tokens and seconds >= 0:
            (self.remote if remote else self.local).observe(remaining, seconds)
