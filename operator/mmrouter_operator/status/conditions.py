"""Every condition and reason of a status, as in docs/conditions.md, and which changes of them are Events. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mmrouter_operator.model.external_refs import EXTERNAL_KINDS

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition of a status, without its times."""

    type: str
    status: Truth
    reason: str
    message: str


READY: Final = "Ready"
PROGRESSING: Final = "Progressing"
DEGRADED: Final = "Degraded"
SPEC_VALID: Final = "SpecValid"
FRONTEND_READY: Final = "FrontendReady"
ENCODERS_READY: Final = "EncodersReady"
WORKERS_READY: Final = "WorkersReady"
RENDERERS_READY: Final = "RenderersReady"
EXACT: Final = "ExactRoutingVerified"
CHAIN: Final = "ChainComplete"
PRESSURE: Final = "ShmPressure"
DEVICE: Final = "DeviceMismatch"
COMPATIBLE: Final = "PoolsCompatible"
REVISION_PINNED: Final = "RevisionPinned"
AUTHENTICATED: Final = "Authenticated"
AUTOSCALING: Final = "AutoscalingAvailable"
MONITORING: Final = "PodMonitorAvailable"
GATEWAY: Final = "GatewayAccepted"
RESTRICTED: Final = "PodSecurityRestricted"
OVERLAID: Final = "PodTemplateApplied"

BLOCKS: Final = (
    *("ChildNameTaken", "ReplicaFailure", "ProgressDeadlineExceeded", "NoSurgeRoom", "Unschedulable"),
    *("ImagePullFailed", "ContainerConfigError", "CrashLoopBackOff", "SetCannotOverlap", "RevisionLost"),
)
"""Reasons of a Blocked plan."""

MISSING: Final[Mapping[str, str]] = {kind: f"{kind}Missing" for kind in EXTERNAL_KINDS}
"""Kind of a missing object that the resource refers to -> reason."""


def _reasons(true: Iterable[str] = (), false: Iterable[str] = (), unknown: Iterable[str] = ()) -> dict[str, Truth]:
    return {**dict.fromkeys(true, "True"), **dict.fromkeys(false, "False"), **dict.fromkeys(unknown, "Unknown")}


_REPLICAS: Final = _reasons(["AllReady"], ["RollingOut", "ReplicasMissing", "ScaledToZero"])
_NOT_READY: Final = ("FrontendNotReady", "EncodersNotReady", "WorkersNotReady", "RenderersNotReady")
_FAULTS: Final = ("ChildRefused", "ChildContested", "SecretMalformed", "SecretRecreated", "ReconcileFailed")

REASONS: Final[Mapping[str, Mapping[str, Truth]]] = {
    READY: _reasons(
        ["Serving"], ["SpecInvalid", *_NOT_READY, "Blocked", "RollingOut", "SecretUnusable"], ["ReconcileFailed"]
    ),
    PROGRESSING: _reasons(
        ["RollingOut"], ["Complete", "Paused", "SpecInvalid", "SecretUnusable", "ChildRefused", *BLOCKS]
    ),
    DEGRADED: _reasons(["SpecInvalid", *MISSING.values(), *BLOCKS, *_FAULTS], ["AsExpected"]),
    SPEC_VALID: _reasons(["Valid"], ["Invalid"]),
    FRONTEND_READY: _REPLICAS,
    ENCODERS_READY: _REPLICAS,
    WORKERS_READY: _REPLICAS,
    RENDERERS_READY: _REPLICAS,
    EXACT: _reasons(["Verified"], ["NotExact", "NotVerifiedInTime"], ["Verifying", "FrontendNotHeard", "NoReplicas"]),
    CHAIN: _reasons(["EveryStage"], ["NoPair", "NoDecode", "NoPrefill", "NoEncoder"], ["Starting", "FrontendNotHeard"]),
    PRESSURE: _reasons(["AboveHighWaterMark"], ["BelowHighWaterMark"], ["NotMeasured", "FrontendNotHeard"]),
    DEVICE: _reasons(["OtherDevice"], ["AsRequested"]),
    COMPATIBLE: _reasons(["Compatible"], ["LayoutsDiffer"]),
    REVISION_PINNED: _reasons(["Commit"], ["ModelRevisionUnpinned"]),
    AUTHENTICATED: _reasons(["ApiKeys"], ["NoApiKeys"]),
    AUTOSCALING: _reasons(["Available"], ["AutoscalingUnavailable"]),
    MONITORING: _reasons(["Available"], ["PodMonitorUnavailable"]),
    GATEWAY: _reasons(["Accepted"], ["GatewayApiUnavailable", "NotAccepted"], ["NotReported"]),
    OVERLAID: _reasons(["Applied"], ["FieldsOverridden"]),
    RESTRICTED: _reasons(["Restricted"], ["NodeSharedMemory", "BelowRestricted"]),
}
"""Condition -> reason -> the status that the condition has for it."""

TEXTS: Final = Path(__file__).with_suffix(".yaml")
"""``Reason: [meaning, what to do]`` of every condition, for docs/conditions.md and `mmrouter doctor`."""

_MAX_MESSAGE: Final = 4000
"""Characters of a message."""

ABNORMAL: Final = frozenset({DEGRADED, PRESSURE, DEVICE})
"""Conditions for which True is the bad state. For the others it is False, except for Progressing, which has none."""

REPLICAS_READY: Final = (FRONTEND_READY, WORKERS_READY, ENCODERS_READY, RENDERERS_READY)
"""Conditions about replicas."""


def condition(type_: str, reason: str, message: str) -> Condition:
    """Return a condition by its reason. Raises ``KeyError`` for a pair that the table does not have."""
    bounded = message if len(message) <= _MAX_MESSAGE else message[:_MAX_MESSAGE] + "..."
    return Condition(type_, REASONS[type_][reason], reason, bounded)


@dataclass(frozen=True, slots=True)
class Transition:
    """One Event of ``events.k8s.io/v1``."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str


_QUIET: Final = frozenset({"RollingOut", "Paused", "SpecInvalid", "SecretUnusable", "ScaledToZero"})
"""Reasons that another condition reports more precisely."""


def transitions(previous: Mapping[str, Any] | None, status: Mapping[str, Any]) -> list[Transition]:
    """Return the Events between two statuses; none between two that differ in messages only.

    Of a new resource, only Ready and abnormal conditions are recorded.
    """
    before = {item["type"]: item for item in (previous or {}).get("conditions") or []}
    events = [_transition(item, before.get(item["type"])) for item in status.get("conditions") or []]
    return [item for item in events if item is not None]


def _transition(item: Mapping[str, Any], last: Mapping[str, Any] | None) -> Transition | None:
    type_, truth, reason, message = item["type"], item["status"], item["reason"], item["message"]
    if last is not None and (last["status"], last["reason"]) == (truth, reason):
        return None
    if type_ == PROGRESSING:
        if reason not in ("RollingOut", "Complete", "Paused") or (last is None and reason == "Complete"):
            return None  # Degraded reports what blocks a rollout
        return Transition("Normal", reason, message)
    if truth == "Unknown":
        return None
    if (truth == "True") == (type_ in ABNORMAL):
        if reason in _QUIET and not (type_ == SPEC_VALID or (type_, reason) == (READY, "SpecInvalid")):
            return None
        if last is None and type_ in (READY, *REPLICAS_READY):
            return None  # nothing was lost: it never was ready
        return Transition("Warning", reason, message)
    if last is None and type_ != READY:
        return None
    if last is not None and last["status"] == truth:
        return None
    return Transition("Normal", "Recovered" if type_ in ABNORMAL else type_, message)
