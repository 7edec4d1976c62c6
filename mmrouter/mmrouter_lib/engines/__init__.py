"""One file per engine: launch flags, event decoding, request rewriting, metric names."""

from types import ModuleType


def adapter(engine_type: str) -> ModuleType:
    """Return the module of an engine (``spec.engine.type``): ``mmrouter.engines.vllm`` or ``.sglang``.

    Both offer ``decode_batch``, ``launch``, ``OWNED_FLAGS``, ``rewrite_chat``, ``prompt_error_field``, ``METRICS``,
    ``parse_load``, ``parse_block_size``, ``REFUSED_FIELDS`` and ``FAMILIES``. Raises ``ValueError`` for another engine.
    """
    # The adapters import the resource's models, which import the adapters' flags: the arrow is taken at call time.
    match engine_type:
        case "vllm":
            from mmrouter.engines import vllm  # noqa: PLC0415

            return vllm
        case "sglang":
            from mmrouter.engines import sglang  # noqa: PLC0415

            return sglang
    raise ValueError(f"there is no adapter for engine type {engine_type!r}, only for vllm and sglang")
