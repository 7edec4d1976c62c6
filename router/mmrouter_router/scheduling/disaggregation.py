"""Pipeline form of a request: which of encode, prefill and decode run, by the pods that are available. Pure.

A form that needs a pool without an available pod degrades to the next simpler form that still answers.
"""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Final, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_router.scheduling.offload_comparison import WayComparison

SHORT_TOKENS: Final = 512
"""A prompt with fewer tokens left to compute, which is one step of any accelerator, is computed where it is decoded.

A transfer costs a round trip to two engines. Above the bound the measured costs decide."""

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
    """Decides whether a prompt is computed by the engine that answers or by a prefill engine.

    ``tokens`` are those of the prompt that the answering engine does not hold. Requests that it computes for another
    reason than the cost are not compared.
    """

    def __init__(
        self, short_tokens: int = SHORT_TOKENS, *, always: bool = False, clock: Callable[[], float] = time.time
    ) -> None:
        """``short_tokens``: 0 sends every prompt to a prefill engine. ``always``: sends every one that is not short.

        ``clock``: the wall clock.
        """
        self._short_tokens, self._always = short_tokens, always or short_tokens == 0
        self.comparison = WayComparison(1.0, clock)

    def reason_local(self, tokens: int) -> str:
        """Return why the answering engine computes the prompt: ``short``, ``slower``, or empty for a prefill engine."""
        if tokens < self._short_tokens:
            return "short"
        if self._always or self.comparison.costs == (None, None):  # before any measurement: the pools exist for it
            return ""
        return "" if self.comparison.elsewhere(tokens) else "slower"
