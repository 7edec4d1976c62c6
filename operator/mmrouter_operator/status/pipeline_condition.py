"""The condition of the chain of engines: whether requests go through every stage that the pools are there for. Pure.

The frontends know: each says which stages its requests go without now. A pod that is Ready and takes no work, or one
that serves and is not Ready yet, is no reason to guess otherwise.
"""

from collections.abc import Mapping
from typing import Any, Final

from mmrouter_lib.api import MMRouterDeployment
from mmrouter_operator.model.snapshot import Snapshot
from mmrouter_operator.planning.planner import RolloutPlan
from mmrouter_operator.planning.readiness_gates import counted_frontends, ready_frontends
from mmrouter_operator.planning.rollout import Progress
from mmrouter_operator.status import conditions as c
from mmrouter_operator.status.conditions import Condition, condition

ROLES: Final = frozenset({"encoder", "prefill", "decode"})
"""Those that do one stage. Where there is none the condition is left out."""
_NO_ENCODER: Final = (
    "no encoder can take work: images are encoded where the prompt is computed, by SGLang they are refused"
)
WITHOUT: Final[Mapping[str, tuple[str, str]]] = {
    "no_pair": ("NoPair", "no prefill and decode pod can take work together: what no worker takes is refused"),
    "no_decode": ("NoDecode", "no decode pod can take work: requests are answered where their prompt is computed"),
    "no_prefill": ("NoPrefill", "no prefill pod can take work: prompts are computed where they are decoded"),
    "no_encoder": ("NoEncoder", _NO_ENCODER),
}
"""What a frontend says -> reason and sentence, the worst first."""


def of_chain(
    dep: MMRouterDeployment, snapshot: Snapshot, plan: RolloutPlan, last: Mapping[str, Any] | None
) -> Condition | None:
    """Return the condition, ``None`` where no pool does one stage. ``last``: what it said before."""
    if not any(pool.role in ROLES for pool in dep.spec.pools):
        return None
    fronts = counted_frontends(snapshot)
    before = last or {}
    if not fronts and ready_frontends(snapshot) and before.get("reason") in c.REASONS[c.CHAIN]:
        # An operator that has just started knows nothing yet; what it said last still stands.
        return condition(c.CHAIN, str(before["reason"]), str(before.get("message", "")))
    heard = (snapshot.reports.get(front.uid) for front in fronts)
    told = [report.degraded for report in heard if report is not None and report.degraded is not None]
    if not told:
        return condition(c.CHAIN, "FrontendNotHeard", "no frontend has told yet which stages requests go through")
    missing = {word: sum(word in each for each in told) for word in WITHOUT}
    found = [(*WITHOUT[word], count) for word, count in missing.items() if count]
    if not found:
        return condition(c.CHAIN, "EveryStage", "requests go through every stage that they need")
    said = "; ".join(
        sentence if count == len(told) else f"{count} of {len(told)} frontends: {sentence}"
        for _, sentence, count in found
    )
    if before.get("status") not in ("True", "False") and isinstance(plan.outcome, Progress):
        return condition(c.CHAIN, "Starting", f"pods are on their way; until then {said}")
    return condition(c.CHAIN, found[0][0], said)
