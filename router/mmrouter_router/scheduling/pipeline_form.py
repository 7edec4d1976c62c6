"""Which engines serve a request together: encode, prefill, decode, or fewer where that is enough or all there is.

Pure: pools and pods as values in, the form of one request out. A form that needs a pool which is empty or down becomes
the next simpler one that still answers, and says so.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, Literal

from mmrouter_lib.api import EngineType
from mmrouter_lib.engines import adapter
from mmrouter_router.core.linear_cost import Line, Rate

SHORT_TOKENS: Final = 512
"""A prompt of which fewer tokens remain to be computed is computed where it is decoded.

A transfer costs a round trip to two engines, and so few tokens are one step of any accelerator beside the answers that
it makes (the field's own bound is 2048 tokens with at least 30 % cached; facts on routing 6). What is measured decides
above it.
"""
EXPLORE: Final = 16
"""Of so many requests that one way would win, one goes the other way: what is never done is never measured."""
ENOUGH: Final = 8
"""Measurements of each way before they are compared."""

Missing = Literal["no_encoder", "no_prefill", "no_decode", "no_pair"]


@dataclass(frozen=True, slots=True)
class Form:
    """The stages of a request. ``answers``: the roles of which one engine answers the client; empty: nobody can.

    ``degraded``: pools of the resource that this form goes without, because no pod of theirs can take work.
    ``paired``: who prefills and who answers get the request at once, and neither does anything alone.
    """

    answers: frozenset[str]
    prefills: bool = False
    encodes: bool = False
    degraded: tuple[Missing, ...] = ()
    paired: bool = False

    @property
    def staged(self) -> bool:
        """Whether anything is done before an engine answers."""
        return self.prefills or self.encodes

    @property
    def name(self) -> str:
        """The stages in their order, as in ``encode-prefill-decode``; ``whole`` for one engine that does all."""
        answer = "decode" if self.prefills else "whole"
        return "-".join([*(["encode"] if self.encodes else []), *(["prefill"] if self.prefills else []), answer])


WHOLE: Final = Form(frozenset({"worker"}))
"""One worker does everything."""


def form(engine: EngineType, pools: Collection[str], able: Collection[str]) -> Form:
    """Return the fullest form that the pods can serve now.

    ``pools``: roles that the resource has. ``able``: roles with a pod that can take work. A vLLM of either role serves
    a request whole when its partner is away; one of SGLang answers only in pairs
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
    return Form(frozenset(answers), prefills, encodes, tuple(degraded), paired=prefills and not alone)


def proves(role: str) -> bool:
    """Whether a canary can prove pods of a role: their engines answer chats, of SGLang some of them in pairs."""
    return role in ("worker", "prefill", "decode")


def publishes(engine: str, role: str) -> bool:
    """Whether engines of a role publish the blocks of what they computed. A decode engine of SGLang keeps no cache, so
    there is nothing to predict of it: it is proved by its half of an answer.
    """
    return role in adapter(engine).publishing_roles


class Worth:
    """Whether a prefill elsewhere is worth it: a bound in tokens, and what both ways were measured to take.

    Seconds are from the decision to the answer's first byte, tokens those that remained to be computed.
    """

    def __init__(self, short_tokens: int = SHORT_TOKENS) -> None:
        self.short_tokens = short_tokens
        first = Line(0.0, 1e-4)
        self.here, self.apart = Rate(first), Rate(first)
        self._won = 0

    def why_here(self, remaining: int) -> str:
        """Return why a prompt is computed where it is decoded: ``short``, ``slower``, or empty when it is not.

        ``remaining``: tokens of the prompt that the decoder does not hold. With a bound of 0 nothing is short and
        nothing is compared.
        """
        if self.short_tokens == 0:
            return ""
        if remaining < self.short_tokens:
            return "short"
        if min(self.here.measured, self.apart.measured) < ENOUGH:
            # Both ways in turn until both are known, the one that the pools are made for first.
            return "slower" if self.here.measured < self.apart.measured - 1 else ""
        here = self.here.line.seconds(remaining) < self.apart.line.seconds(remaining)
        self._won += 1
        if self._won % EXPLORE == 0:
            here = not here
        return "slower" if here else ""

    def observe(self, remaining: int, seconds: float, *, apart: bool) -> None:
        """Take in how long the first byte of an answer took. Short prompts say nothing of long ones."""
        if remaining >= self.short_tokens and seconds >= 0:
            (self.apart if apart else self.here).observe(remaining, seconds)
