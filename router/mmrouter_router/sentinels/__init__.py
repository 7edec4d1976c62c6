"""SGLang's sentinels of images: predicted from the encoded bytes where that is exact, else learned.

SGLang overwrites an image's placeholder tokens by values of its own (docs/engine-facts/sglang.md#sentinels). The router
writes them into its copy of the prompt, so that its keys equal the engine's blocks. All state is kept per *scope*,
engine version and pool, because the values depend on both.
"""

from mmrouter_router.sentinels.align import SentRequest
from mmrouter_router.sentinels.processor_fingerprints import FingerprintPlan, plan_fingerprints
from mmrouter_router.sentinels.store import RankEpoch, SentinelStore, sha256_of
from mmrouter_router.sentinels.table import Values
from mmrouter_router.sentinels.token_ids import FilledPrompt, fill_sentinels, observe_sentinels

__all__ = [
    "FilledPrompt",
    "FingerprintPlan",
    "RankEpoch",
    "SentRequest",
    "SentinelStore",
    "Values",
    "fill_sentinels",
    "observe_sentinels",
    "plan_fingerprints",
    "sha256_of",
]
