"""Which encoder encodes which image, and when: pure, the time comes with every call.

:class:`Encoders` is the machine. Whoever does the sending calls it when something happened and does what its
:class:`Outcome` says. Units are seconds and visual tokens.
"""

from mmrouter_router.encoding.scheduler import Encoders
from mmrouter_router.encoding.types import (
    Abort,
    Answer,
    Encoder,
    Full,
    Image,
    Lost,
    Mode,
    Outcome,
    Placed,
    Ready,
    Start,
    View,
)

__all__ = [
    "Abort",
    "Answer",
    "Encoder",
    "Encoders",
    "Full",
    "Image",
    "Lost",
    "Mode",
    "Outcome",
    "Placed",
    "Ready",
    "Start",
    "View",
]
