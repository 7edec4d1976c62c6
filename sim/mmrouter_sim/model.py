"""Load a model folder: tokenizer, chat template, image geometry, stop tokens and context length."""

import json
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from mmrouter_lib import families
from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.prompt import Prompter, PromptImage
from mmrouter_sim.core.hashing import Media
from mmrouter_sim.errors import RequestError

# Large sizes of several shapes; the largest token count among them is the largest of a family.
_LARGE = ((16_384, 16_384), (4096, 4096), (50, 8000), (1344, 336), (336, 1344), (1008, 336), (672, 672), (1, 1))


@dataclass(frozen=True, slots=True)
class Limits:
    """``--mm-processor-kwargs`` that are simulated."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    num_crops: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """One loaded model folder."""

    name: str  # the --model argument: part of default image names
    tokenizer: Tokenizer
    prompter: Prompter
    family: Family
    context: int  # tokens
    stop_ids: tuple[int, ...]
    largest_image: int  # visual tokens
    model_type: str = ""
    architectures: tuple[str, ...] = ()

    def count(self, width: int, height: int) -> int:
        """Return an image's placeholder tokens. Raises :class:`RequestError` for an unsupported size."""
        try:
            return self.family.count(width, height)
        except ImageSizeError as error:
            raise RequestError(f"Failed to apply the image processor of {self.family.name}: {error}") from error

    def expand(
        self, text: str, images: Sequence[tuple[str, int]], *, add_special_tokens: bool
    ) -> tuple["array[int]", tuple[Media, ...]]:
        """Return token ids and media of a prompt; ``images`` are (identifier, token count) in prompt order."""
        # The prompter passes 32 bytes per image through: here the image's number.
        parts = [PromptImage(identity=n.to_bytes(32, "big"), count=count) for n, (_, count) in enumerate(images)]
        expanded = self.prompter.expand(text, parts, add_special_tokens=add_special_tokens)
        media = (
            Media(images[int.from_bytes(span.identity, "big")][0], span.offset, span.length) for span in expanded.spans
        )
        return expanded.ids, tuple(sorted(media, key=lambda item: item.offset))


def find_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model argument: a path, or a snapshot in the hub's cache. Raises ``ValueError``."""
    path = Path(model)
    if path.is_dir():
        return path
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub") / f"models--{model.replace('/', '--')}"
    name = revision or "main"
    reference = hub / "refs" / name
    snapshot = hub / "snapshots" / (reference.read_text().strip() if reference.is_file() else name)
    if snapshot.is_dir():
        return snapshot
    raise ValueError(f"model {model!r} is neither a folder nor in the hub's cache; the simulator downloads nothing")


def load(name: str, folder: Path, *, chat_template: str | None, processor: Mapping[str, Any]) -> Model:
    """Load a model folder. Raises ``ValueError`` or ``OSError`` if it cannot be served."""
    unknown = sorted(set(processor) - {"min_pixels", "max_pixels", "num_crops"})
    if unknown:
        raise ValueError(f"--mm-processor-kwargs: {unknown[0]!r} is not simulated")
    config = _read(folder / "config.json")
    family = families.load_family(folder, Limits(**processor))
    if family is None:
        raise ValueError(f"{folder / 'config.json'}: model_type {config.get('model_type')!r} is not simulated")
    prompter = Prompter.load(folder, chat_template=chat_template, family=family)
    return Model(
        name=name,
        tokenizer=prompter.tokenizer,
        prompter=prompter,
        family=family,
        context=_context(config),
        stop_ids=_stop_ids(folder, config, prompter.tokenizer),
        largest_image=_largest(family),
        model_type=str(config.get("model_type")),
        architectures=tuple(config.get("architectures") or ()),
    )


def _context(config: dict[str, Any]) -> int:
    for section in (config, config.get("text_config") or {}):
        value = section.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    raise ValueError("config.json: max_position_embeddings is missing; give --max-model-len")


def _stop_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """The ids of generation_config.json and config.json, and the tokenizer's own end-of-text token, in this order."""
    found: list[int] = []
    for values in (_read(folder / "generation_config.json"), config, config.get("text_config") or {}):
        value = values.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    number = tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
    return tuple(dict.fromkeys([*found, number] if number is not None else found))


def _largest(family: Family) -> int:
    counts = []
    for width, height in _LARGE:
        try:
            counts.append(family.count(width, height))
        except ImageSizeError:
            continue
    return max(counts)


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: a JSON object is expected")
    return value
