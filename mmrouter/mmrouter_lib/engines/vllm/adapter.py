"""The vLLM adapter."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from mmrouter_lib.engines.base.adapter import EngineAdapter
from mmrouter_lib.engines.base.server_info import EngineInfo
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_lib.engines.vllm.metrics import METRICS, parse_block_size, parse_load
from mmrouter_lib.engines.vllm.request import REFUSED_FIELDS, prompt_error_field, rewrite_chat


def parse_info(answers: Sequence[Mapping[str, Any]]) -> EngineInfo:
    """Read the answer of ``/version``."""
    version = answers[0].get("version")
    return EngineInfo(version if isinstance(version, str) else "")


VLLM: Final = EngineAdapter(
    type="vllm",
    health_path="/health",
    decode_batch=decode_batch,
    metrics=METRICS,
    parse_load=parse_load,
    parse_block_size=parse_block_size,
    info_paths=("/version",),
    parse_info=parse_info,
    rewrite_chat=rewrite_chat,
    prompt_error_field=prompt_error_field,
    refused_fields=REFUSED_FIELDS,
    divergent_fields={},
    normalizes_messages=False,
    learns_image_identity=False,
    asks_encoders_itself=False,
    pairs_prefill_and_decode=False,
    publishing_roles=frozenset({"worker", "prefill", "decode"}),
)
