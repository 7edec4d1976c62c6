"""Which changes of conditions are recorded as Events. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from mmrouter_operator.status import conditions as c

ACTION: Final = "Reconcile"


@dataclass(frozen=True, slots=True)
class Transition:
    """One Event of ``events.k8s.io/v1``."""

    type: Literal["Normal", "Warning"]
    reason: str
    action: str
    note: str


_QUIET: Final = frozenset({"RollingOut", "Paused", "SpecInvalid", "SecretUnusable", "ScaledToZero"})
"""Reasons that another condition reports more precisely."""


def transitions(previous: Mapping[str, Any] | None, status: Mapping[str, Any]) -> list[Transition]:
    """Return the Events between two statuses; none between equal ones, whatever their messages say.

    Of a new resource, only Ready and abnormal conditions are recorded.
    """
    before = {item["type"]: item for item in (previous or {}).get("conditions") or []}
    found = [_transition(item, before.get(item["type"])) for item in status.get("conditions") or []]
    return [item for item in found if item is not None]


def _transition(item: Mapping[str, Any], last: Mapping[str, Any] | None) -> Transition | None:
    type_, truth, reason, message = item["type"], item["status"], item["reason"], item["message"]
    if last is not None and (last["status"], last["reason"]) == (truth, reason):
        return None
    if type_ == c.PROGRESSING:
        if reason not in ("RollingOut", "Complete", "Paused") or (last is None and reason == "Complete"):
            return None  # Degraded reports what blocks a rollout
        return Transition("Normal", reason, ACTION, message)
    if truth == "Unknown":
        return None
    if (truth == "True") == (type_ in c.ABNORMAL):
        if reason in _QUIET and not (type_ == c.SPEC_VALID or (type_, reason) == (c.READY, "SpecInvalid")):
            return None
        if last is None and type_ in (c.READY, *c.REPLICAS_READY):
            return None  # nothing was lost: it never was ready
        return Transition("Warning", reason, ACTION, message)
    if last is None and type_ != c.READY:
        return None
    if last is not None and last["status"] == truth:
        return None
    return Transition("Normal", "Recovered" if type_ in c.ABNORMAL else type_, ACTION, message)
