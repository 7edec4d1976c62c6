"""Type aliases shared by all layers: the exactness of a prediction, the scope of SGLang's sentinels."""

from typing import Literal

Exactness = Literal["exact", "partial", "affinity"]
"""How much of a prompt is predicted: all of it, up to the first image that is not, or nothing."""

Scope = tuple[str, str]
"""Engine version and pool: what an image's sentinels depend on besides the image."""
