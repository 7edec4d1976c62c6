"""Between vLLM's processed images and packed ones. Here torch and vLLM are used, at call time."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from mmrouter_handover.plugin.packed_item import ALIGNMENT, Field, Header, Node, Packer, Plan, Tensor, Update, plain
from mmrouter_handover.plugin.processor_cache import Processed
from mmrouter_handover.plugin.wire import HandOverFailed

MODALITY = "image"


def pack(settings: str, name: str, processed: Processed) -> Plan:
    """Return how a processed image is packed. Raises :class:`HandOverFailed` where it is of a kind that cannot be."""
    item, updates = processed
    packer = Packer()
    fields = [_field(packer, key, element) for key, element in item.items()]
    return packer.plan(settings, name, MODALITY, fields, [_update(update) for update in updates])


def unpack(header: Header, tensors: memoryview) -> Processed:
    """Return what :func:`pack` was given; its tensors are copies, in memory of their own."""
    import torch  # noqa: PLC0415
    from vllm.multimodal.inputs import MultiModalFieldElem, MultiModalKwargsItem  # noqa: PLC0415

    whole = torch.empty(header.length + ALIGNMENT, dtype=torch.uint8)  # never empty, so that it has an address
    memoryview(whole.numpy())[: len(tensors)] = tensors

    def tensor(placed: Tensor) -> Any:
        dtype = getattr(torch, placed.dtype)
        if not placed.length:
            return torch.empty(placed.shape, dtype=dtype)
        return whole[placed.offset : placed.offset + placed.length].view(dtype).reshape(placed.shape)

    elements = {
        field.name: MultiModalFieldElem(data=plain(field.node, tensor), field=_batching(field))
        for field in header.fields
    }
    return MultiModalKwargsItem(elements), [_resolved(header.modality, update) for update in header.updates]


def settings_of(version: str, renderer: Any) -> str:
    """Return a digest of everything besides the image that decides what comes of processing it."""
    config, processor = renderer.model_config, renderer.mm_processor
    multimodal = config.multimodal_config
    values = {
        "vllm": version.partition("+")[0],
        "architectures": list(config.architectures),
        "dtype": str(config.dtype),
        "processor": type(processor).__qualname__,
        "mm_processor_kwargs": multimodal.mm_processor_kwargs,
        "media_io_kwargs": multimodal.media_io_kwargs,
        "device_normalizes": multimodal.mm_device_do_normalize,
        "image_processor": _image_processor(processor),
        "vocabulary": _vocabulary(renderer),
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=repr).encode()).hexdigest()


def _image_processor(processor: Any) -> Any:
    found: Any = getattr(processor.info.get_hf_processor(), "image_processor", None)
    if not hasattr(found, "to_dict"):
        return type(found).__qualname__
    # Where the model lies is no matter; what it says is.
    return {key: value for key, value in found.to_dict().items() if key not in ("name_or_path", "_name_or_path")}


def _vocabulary(renderer: Any) -> Any:
    """What ids the placeholders of an image are made of."""
    added: dict[str, int] = getattr(renderer.tokenizer, "get_added_vocab", dict)()
    return sorted(added.items(), key=str)


def _field(packer: Packer, name: str, element: Any) -> Field:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField  # noqa: PLC0415

    node, field = _node(packer, element.data), element.field
    # Exact types: what a subclass means to its model cannot be known.
    if type(field) is MultiModalBatchedField:
        return Field(name, "batched", node, field.keep_on_cpu)
    if type(field) is MultiModalFlatField:
        return Field(name, "flat", node, field.keep_on_cpu, dim=field.dim)
    if type(field) is MultiModalSharedField:
        return Field(name, "shared", node, field.keep_on_cpu, batch_size=field.batch_size)
    raise HandOverFailed("refused", f"field {name} is batched by {type(field).__qualname__}")


def _batching(field: Field) -> Any:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFlatField, MultiModalSharedField  # noqa: PLC0415

    if field.kind == "batched":
        return MultiModalBatchedField(keep_on_cpu=field.keep_on_cpu)
    if field.kind == "flat":
        # The slices cut the image out of its batch, which is done; putting images together again uses ``dim`` alone.
        return MultiModalFlatField(slices=[slice(None)], dim=field.dim, keep_on_cpu=field.keep_on_cpu)
    return MultiModalSharedField(batch_size=field.batch_size, keep_on_cpu=field.keep_on_cpu)


def _node(packer: Packer, data: Any) -> Node:
    import torch  # noqa: PLC0415

    if isinstance(data, torch.Tensor):
        flat = data.detach().cpu().contiguous()
        raw = memoryview(flat.reshape(-1).view(torch.uint8).numpy()) if flat.numel() else memoryview(b"")
        return packer.tensor(str(flat.dtype).removeprefix("torch."), tuple(flat.shape), raw)
    if data is None or isinstance(data, int | float):
        return Node(number=data)
    if isinstance(data, list | tuple):
        return Node(nodes=[_node(packer, inner) for inner in data])
    raise HandOverFailed("refused", f"a field holds {type(data).__qualname__}")


def _update(update: Any) -> Update:
    target, content = update.target, update.content
    if not isinstance(target, list):
        raise HandOverFailed("prompt", "the image's place in the prompt is a rule, not ids")
    full = [int(token) for token in content.full]
    mask = None if content.is_embed is None else bytes(int(bool(here)) for here in content.is_embed(full))
    return Update(update.mode.value, [int(token) for token in target], full, mask)


def _resolved(modality: str, update: Update) -> Any:
    import torch  # noqa: PLC0415
    from vllm.multimodal.processing.processor import PromptUpdateDetails, ResolvedPromptUpdate, UpdateMode  # noqa: PLC0415

    mask = update.mask

    def is_embed(full: Sequence[int]) -> Any:
        if mask is None or len(full) != len(mask):
            raise ValueError(f"{len(full)} ids stand for an image that was handed over with {len(update.full)}")
        return torch.tensor(list(mask), dtype=torch.bool)

    return ResolvedPromptUpdate(
        modality=modality,
        item_idx=0,  # vLLM puts in the image's number whenever it takes one out of its cache
        mode=UpdateMode(update.mode),
        target=update.target,
        content=PromptUpdateDetails(full=update.full, is_embed=None if mask is None else is_embed),
    )
