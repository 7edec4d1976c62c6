"""What SGLang's sentinels are for an image: predicted from its bytes where that is exact, learned where it is not.

SGLang overwrites an image's placeholder tokens by values of its own (docs/engine-facts/sglang.md#sentinels). A
router that knows them
puts them into its own copy of the prompt, and its keys are the engine's blocks. Everything here is kept per *scope*,
engine version and pool, because that is what the values depend on.
"""

from mmrouter_router.sentinels.align import Asked
from mmrouter_router.sentinels.fill import Filled, fill
from mmrouter_router.sentinels.observe import observe
from mmrouter_router.sentinels.provider import Plan, plan
from mmrouter_router.sentinels.store import Line, Sentinels, sha256_of
from mmrouter_router.sentinels.table import Values

__all__ = ["Asked", "Filled", "Line", "Plan", "Sentinels", "Values", "fill", "observe", "plan", "sha256_of"]
