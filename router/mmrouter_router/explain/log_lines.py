"""Lines of the router's log: at its start which requests it predicts, and at level debug every decision."""

import logging
from collections.abc import Sequence

from mmrouter_lib.api.spec import Spec
from mmrouter_router.explain.decisions import DecisionTrace
from mmrouter_router.scheduling.scoring import PROMPT_BLIND_POLICIES

log = logging.getLogger("mmrouter.decision")


def prediction_line(
    spec: Spec,
    *,
    family: str,
    unknown: str,
    learns_images: bool,
    unpredicted: str = "",
    text_only: bool = False,
    hidden: Sequence[str] = (),
) -> str:
    """Return which requests of a deployment are predicted exactly, and why the others are not.

    ``family``: the modelled one; ``unknown``: the model type where no prompt is predicted, for the reason
    ``unpredicted``. ``text_only``: the family has no place for images. ``learns_images``: whether the engine names
    images itself. ``hidden``: layers whose evictions it does not tell.
    """
    engine, policy = spec.engine.type, spec.routing.policy
    if unknown and not any(pool.role == "renderer" for pool in spec.pools):
        return (
            f"no prompt of {unknown} is predicted for {engine} ({unpredicted}), and there is no renderer pool: all "
            "requests are placed by affinity"
        )
    if unknown:
        line = f"chats are exact by the renderers' prompts, because family {unknown} is not modelled for {engine}"
        affinity = "requests to /v1/completions"
    elif text_only:
        line = f"chats without media, and completions, are exact: the texts of {family} are modelled for {engine}"
        affinity = "chats with media"
    else:
        line = f"chats with text and images, and completions, are exact: family {family} is modelled for {engine}"
        affinity = "chats with other media"
    if learns_images and not text_only:
        line += "; an image is partial until its identity in the engine is computed or learned"
    if hidden:
        line += f"; no overlap is promised, because {engine} does not tell which {' and '.join(hidden)} it drops"
    if policy in PROMPT_BLIND_POLICIES:
        line += f"; policy {policy} ignores prompts, so only samples are predicted"
    return f"{line}; {affinity} are placed by affinity"


def log_decision(trace: DecisionTrace) -> None:
    """Write one line about a request's decision, at level debug."""
    if not log.isEnabledFor(logging.DEBUG):
        return
    decision, winner = trace.decision, trace.decision.choice.winner
    reasons = f" ({', '.join(decision.reasons)})" if decision.reasons else ""
    why, held = decision.choice.reason, f"{winner.overlap} of {winner.blocks} blocks held"
    facts = [decision.exactness + reasons, why]
    if trace.unpredicted:
        facts.append("not predicted")
    elif held not in why:
        facts.append(held)
    log.debug("%s to %s: %s", trace.request_id, winner.name, "; ".join(facts))
