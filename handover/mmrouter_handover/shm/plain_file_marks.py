"""What a plain file's name and time of modification say of it: it has no header. Values only, no files."""

from typing import Literal

from mmrouter_handover.shm.files import DRAFT_PREFIX, PLAIN_PREFIX
from mmrouter_handover.shm.slot import CLOCK_SLACK_SECONDS, MAX_LEASE_SECONDS

PlainState = Literal["writing", "leased", "expired"]


def plain_name(since: float, unique: str, suffix: str) -> str:
    """Return the name of a plain file that is made at ``since``, seconds on the node's CLOCK_BOOTTIME."""
    return f"{PLAIN_PREFIX}{int(since * 1000):x}-{unique}{suffix}"


def since_of(name: str) -> float | None:
    """Return when a plain file or its draft was made; ``None`` where its name does not say."""
    try:
        return int(name.removeprefix(DRAFT_PREFIX).removeprefix(PLAIN_PREFIX).partition("-")[0], 16) / 1000
    except ValueError:
        return None


def is_plain(name: str) -> bool:
    """Whether a name in a writer's folder is that of a plain file or of its draft."""
    return name.startswith((PLAIN_PREFIX, DRAFT_PREFIX))


def plain_state(name: str, modified: float, lives: bool, now: float) -> PlainState:
    """Return the state of a plain file whose time of modification, its deadline, is ``modified``.

    A writer that lives removes its files itself, whatever their deadlines say. A deadline further away than any lease
    lasts is none: it would keep its bytes for ever.
    """
    if name.startswith(DRAFT_PREFIX):
        return "writing"
    if lives or now < modified <= now + MAX_LEASE_SECONDS + CLOCK_SLACK_SECONDS:
        return "leased"
    return "expired"
