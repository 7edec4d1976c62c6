"""One file per engine: launch flags, event decoding, request rewriting, metric names."""

from types import ModuleType


def adapter(engine_type: str) -> ModuleType:
    """Return the module of an engine (``spec.engine.type``): ``mmrouter_lib.engines.vllm.adapter`` or ``.sglang``.

    Both offer ``decode_batch``, ``launch``, ``OWNED_FLAGS``, ``rewrite_chat``, ``prompt_error_field``, ``METRICS``,
    ``parse_load``, ``parse_block_size``, ``REFUSED_FIELDS`` and ``FAMILIES``. Raises ``ValueError`` for another engine.
    """
    # The adapters import the resource's models, which import the adapters' flags: the arrow is taken at call time.
    match engine_type:
        case "vllm":
            from mmrouter_lib.engines.vllm import adapter as vllm  # noqa: PLC0415

            return vllm
        case "sglang":
            from mmrouter_lib.engines.sglang import adapter as sglang  # noqa: PLC0415

            return sglang
    raise ValueError(f"there is no adapter for engine type {engine_type!r}, only for vllm and sglang")
