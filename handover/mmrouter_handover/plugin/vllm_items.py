"""Convert between vLLM's processed images and packed items, and check that this vLLM release is supported.

torch and vLLM are imported when a function needs them.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mmrouter_handover.plugin import PROVED_RELEASES, wire
from mmrouter_handover.plugin.processor_cache import Processed
from mmrouter_handover.shm import HandOverError

MODALITY = "image"
_RENDERER = ("_mm_executor", "_mm_processor_cache", "_mm_processor_only_cache", "mm_processor", "model_config")
_CACHE = ("is_cached_item", "get_and_update_item", "touch_sender_cache_item", "release_sender_touches", "clear_cache")


def why_unsupported(version: str) -> str:
    """Return why the plugin is disabled with this vLLM release, or empty for a supported one.

    ``version`` is the package's; a suffix after ``+`` names a build of the same release.
    """
    if version.partition("+")[0] in PROVED_RELEASES:
        return ""
    return f"vLLM {version[:40]} is not known to this plugin; supported: {', '.join(PROVED_RELEASES)}"


def why_incompatible(renderer: Any, cache: str) -> str:
    """Return which attribute that the plugin needs is missing, or empty.

    An image may contain a patched vLLM. ``cache``: the attribute with the processor cache.
    """
    missing = [name for name in _RENDERER if not hasattr(renderer, name)]
    if missing:
        return f"this vLLM's renderer has no {missing[0]}"
    if renderer.mm_processor is None:
        return "the model takes no images"
    if MODALITY not in renderer.mm_processor.info.supported_mm_limits:  # Kimi K2.5: an image without data is an error
        return "the model has no kind of media of its own for images"
    processor_cache = getattr(renderer, cache)
    if processor_cache is None:
        return "the server runs without a processor cache (--mm-processor-cache-gb 0)"
    missing = [name for name in _CACHE if not hasattr(processor_cache, name)]
    return f"this vLLM's processor cache has no {missing[0]}" if missing else ""


def pack(settings: str, name: str, processed: Processed) -> wire.PackedItem:
    """Pack a processed image. Raises :class:`HandOverError` if it has a field that cannot be packed."""
    item, updates = processed
    packer = wire.Packer()
    fields = [_field(packer, key, element) for key, element in item.items()]
    return packer.pack(settings, name, MODALITY, fields, [_update(update) for update in updates])


def unpack(header: wire.Header, tensors: memoryview) -> Processed:
    import torch  # noqa: PLC0415
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem  # noqa: PLC0415

    whole = torch.empty(header.length + wire.ALIGNMENT, dtype=torch.uint8)  # never empty, so it has an address
    memoryview(whole.numpy())[: len(tensors)] = tensors

    def tensor(placed: wire.Tensor) -> Any:
        dtype = getattr(torch, placed.dtype)
        if not placed.length:
            return torch.empty(placed.shape, dtype=dtype)
        return whole[placed.offset : placed.offset + placed.length].view(dtype).reshape(placed.shape)

    elements = {
        field.name: MultiModalFieldElem(data=wire.unpack_node(field.node, tensor), field=_batching(field))
        for field in header.fields
    }
    return MultiModalKwargsItem(elements), [_resolved(header.modality, update) for update in header.updates]


def settings_digest(version: str, renderer: Any) -> str:
    """Return a digest of every setting that affects the processing of an image."""
    config, processor = renderer.model_config, renderer.mm_processor
    multimodal = config.multimodal_config
    added: dict[str, int] = getattr(renderer.tokenizer, "get_added_vocab", dict)()  # has the image placeholders
    values = {
        "vllm": version.partition("+")[0],
        "architectures": list(config.architectures),
        "dtype": str(config.dtype),
        "processor": type(processor).__qualname__,
        "mm_processor_kwargs": multimodal.mm_processor_kwargs,
        "media_io_kwargs": multimodal.media_io_kwargs,
        "device_normalizes": multimodal.mm_device_do_normalize,
        "image_processor": _image_processor(processor),
        "vocabulary": sorted(added.items(), key=str),
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()


def _image_processor(processor: Any) -> Any:
    image_processor: Any = getattr(processor.info.get_hf_processor(), "image_processor", None)
    if not hasattr(image_processor, "to_dict"):
        return type(image_processor).__qualname__
    path = ("name_or_path", "_name_or_path")  # the content of the configuration matters, not its path
    return {key: value for key, value in image_processor.to_dict().items() if key not in path}


def _field(packer: wire.Packer, name: str, element: Any) -> wire.Field:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField  # noqa: PLC0415

    node, field = _node(packer, element.data), element.field
    # Exact types, because the meaning of a subclass is unknown.
    if type(field) is MultiModalBatchedField:
        return wire.Field(name, "batched", node, field.keep_on_cpu)
    if type(field) is MultiModalFlatField:
        return wire.Field(name, "flat", node, field.keep_on_cpu, dim=field.dim)
    if type(field) is MultiModalSharedField:
        return wire.Field(name, "shared", node, field.keep_on_cpu, batch_size=field.batch_size)
    raise HandOverError("refused", f"field {name} is batched by {type(field).__qualname__}")


def _batching(field: wire.Field) -> Any:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField  # noqa: PLC0415

    if field.kind == "batched":
        return MultiModalBatchedField(keep_on_cpu=field.keep_on_cpu)
    if field.kind == "flat":
        # The slices cut the image out of its batch, which is done already; batching again uses ``dim`` only.
        return MultiModalFlatField(slices=[slice(None)], dim=field.dim, keep_on_cpu=field.keep_on_cpu)
    return MultiModalSharedField(batch_size=field.batch_size, keep_on_cpu=field.keep_on_cpu)


def _node(packer: wire.Packer, data: Any) -> wire.Node:
    import torch  # noqa: PLC0415

    if isinstance(data, torch.Tensor):
        flat = data.detach().cpu().contiguous()
        raw = memoryview(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        return packer.tensor(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), raw)
    if data is None or isinstance(data, int | float):
        return wire.Node(number=data)
    if isinstance(data, list | tuple):
        return wire.Node(nodes=[_node(packer, inner) for inner in data])
    raise HandOverError("refused", f"a field holds {type(data).__qualname__}")


def _update(update: Any) -> wire.PromptUpdate:
    target, content = update.target, update.content
    if not isinstance(target, list):
        raise HandOverError("prompt", "the image's position in the prompt is a rule, not ids")
    full = [int(token) for token in content.full]
    mask = None if content.is_embed is None else bytes(int(bool(flag)) for flag in content.is_embed(full))
    return wire.PromptUpdate(update.mode.value, [int(token) for token in target], full, mask)


def _resolved(modality: str, update: wire.PromptUpdate) -> Any:
    import torch  # noqa: PLC0415
    from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode  # noqa: PLC0415

    mask = update.mask

    def is_embed(full: Sequence[int]) -> Any:
        if mask is None or len(full) != len(mask):
            raise ValueError(f"{len(full)} ids stand for an image that was handed over with {len(update.full)}")
        return torch.tensor(list(mask), dtype=torch.bool)

    content = PromptUpdateDetails(full=update.full, is_embed=None if mask is None else is_embed)
    # vLLM sets the image's index when it fetches one from its cache.
    mode = UpdateMode(update.mode)
    return ResolvedPromptUpdate(modality=modality, item_idx=0, mode=mode, target=update.target, content=content)
