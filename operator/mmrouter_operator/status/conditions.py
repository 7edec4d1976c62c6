"""Every condition and reason of a status: the table that the code and docs/conditions.md share."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

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
COMPATIBLE: Final = "PoolsCompatible"
REVISION_PINNED: Final = "RevisionPinned"
AUTHENTICATED: Final = "Authenticated"
AUTOSCALING: Final = "AutoscalingAvailable"
MONITORING: Final = "PodMonitorAvailable"
RESTRICTED: Final = "PodSecurityRestricted"
OVERLAID: Final = "PodTemplateApplied"

BLOCKS: Final[dict[str, Truth]] = {
    "ChildNameTaken": "False",
    "ReplicaFailure": "False",
    "ProgressDeadlineExceeded": "False",
    "NoSurgeRoom": "False",
    "Unschedulable": "False",
    "ImagePullFailed": "False",
    "ContainerConfigError": "False",
    "CrashLoopBackOff": "False",
    "SetCannotOverlap": "False",
    "RevisionLost": "False",
}
"""Reasons of a Blocked plan."""

MISSING: Final[Mapping[str, str]] = {
    "Secret": "SecretMissing",
    "ConfigMap": "ConfigMapMissing",
    "PersistentVolumeClaim": "PersistentVolumeClaimMissing",
    "RuntimeClass": "RuntimeClassMissing",
    "PriorityClass": "PriorityClassMissing",
    "ServiceAccount": "ServiceAccountMissing",
    "ResourceClaim": "ResourceClaimMissing",
    "ResourceClaimTemplate": "ResourceClaimTemplateMissing",
}
"""Kind of a missing object that the resource refers to -> reason."""

_REPLICAS: Final[dict[str, Truth]] = {
    "AllReady": "True",
    "RollingOut": "False",
    "ReplicasMissing": "False",
    "ScaledToZero": "False",
}

REASONS: Final[Mapping[str, Mapping[str, Truth]]] = {
    READY: {
        "Serving": "True",
        "SpecInvalid": "False",
        "FrontendNotReady": "False",
        "EncodersNotReady": "False",
        "WorkersNotReady": "False",
        "RenderersNotReady": "False",
        "Blocked": "False",
        "RollingOut": "False",
        "SecretUnusable": "False",
        "ReconcileFailed": "Unknown",
    },
    PROGRESSING: {
        "RollingOut": "True",
        "Complete": "False",
        "Paused": "False",
        "SpecInvalid": "False",
        "SecretUnusable": "False",
        "ChildRefused": "False",
        **BLOCKS,
    },
    DEGRADED: {
        "AsExpected": "False",
        "SpecInvalid": "True",
        **dict.fromkeys(MISSING.values(), "True"),
        **dict.fromkeys(BLOCKS, "True"),
        "ChildRefused": "True",
        "ChildContested": "True",
        "SecretMalformed": "True",
        "SecretRecreated": "True",
        "ReconcileFailed": "True",
    },
    SPEC_VALID: {"Valid": "True", "Invalid": "False"},
    FRONTEND_READY: dict(_REPLICAS),
    ENCODERS_READY: dict(_REPLICAS),
    WORKERS_READY: dict(_REPLICAS),
    RENDERERS_READY: dict(_REPLICAS),
    EXACT: {
        "Verified": "True",
        "NotExact": "False",
        "NotVerifiedInTime": "False",
        "Verifying": "Unknown",
        "FrontendNotHeard": "Unknown",
        "NoReplicas": "Unknown",
    },
    CHAIN: {
        "EveryStage": "True",
        "NoPair": "False",
        "NoDecode": "False",
        "NoPrefill": "False",
        "NoEncoder": "False",
        "Starting": "Unknown",
        "FrontendNotHeard": "Unknown",
    },
    PRESSURE: {
        "AboveHighWaterMark": "True",
        "BelowHighWaterMark": "False",
        "NotMeasured": "Unknown",
        "FrontendNotHeard": "Unknown",
    },
    COMPATIBLE: {"Compatible": "True", "LayoutsDiffer": "False"},
    REVISION_PINNED: {"Commit": "True", "ModelRevisionUnpinned": "False"},
    AUTHENTICATED: {"ApiKeys": "True", "NoApiKeys": "False"},
    AUTOSCALING: {"Available": "True", "AutoscalingUnavailable": "False"},
    MONITORING: {"Available": "True", "PodMonitorUnavailable": "False"},
    OVERLAID: {"Applied": "True", "FieldsOverridden": "False"},
    RESTRICTED: {"Restricted": "True", "NodeSharedMemory": "False", "BelowRestricted": "False"},
}
"""Condition -> reason -> the status that the condition has for it."""

ABNORMAL: Final = frozenset({DEGRADED, PRESSURE})
"""Conditions for which True is the bad state. For the others it is False, except for Progressing, which has none."""

REPLICAS_READY: Final = (FRONTEND_READY, WORKERS_READY, ENCODERS_READY, RENDERERS_READY)
"""Conditions about replicas."""


def condition(type_: str, reason: str, message: str) -> Condition:
    """Return a condition by its reason. Raises ``KeyError`` for a pair that the table does not have."""
    return Condition(type_, REASONS[type_][reason], reason, message)
