"""What went wrong while a deployment's children were written: values for the status, not exceptions."""

from dataclasses import dataclass

CHILD_NAME_TAKEN = "ChildNameTaken"
"""An object of that name has another owner; it is left alone."""
CHILD_REFUSED = "ChildRefused"
"""The API server refuses the child: a quota, an admission policy, an overlay that makes it invalid."""
CHILD_CONTESTED = "ChildContested"
"""Another writer keeps changing a field of ours; it is repaired with growing pauses."""
SECRET_MALFORMED = "SecretMalformed"  # noqa: S105 - a reason's name
"""The deployment's Secret lacks an entry or holds a wrong one; it is not written over."""
SECRET_RECREATED = "SecretRecreated"  # noqa: S105
"""The deployment's Secret was lost and is made anew: all pods restart."""


@dataclass(frozen=True, slots=True)
class Problem:
    """``reason`` is one of the above; ``message`` is a sentence for people."""

    reason: str
    kind: str
    name: str
    message: str
