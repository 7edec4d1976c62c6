"""Load a model folder (tokenizer, template, image geometry, stop tokens, context length) and make up its answers."""

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from mmrouter_lib import families
from mmrouter_lib.api import EngineType
from mmrouter_lib.engines.prompters import PROMPTERS
from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.prompt import (
    Expanded,
    NotModelledError,
    PlaceholderError,
    Prompter,
    PromptImage,
    PromptTooLongError,
    TemplateError,
    render_arguments,
)
from mmrouter_sim.constraints.shortest import FormError
from mmrouter_sim.core import hub
from mmrouter_sim.core.requests import Media, Sampler
from mmrouter_sim.errors import RequestError

# Large sizes of several shapes; the largest token count among them is the largest of a family.
_LARGE = ((16_384, 16_384), (4096, 4096), (50, 8000), (1344, 336), (336, 1344), (1008, 336), (672, 672), (1, 1))


@dataclass(frozen=True, slots=True)
class Limits:
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
        """Return an image's placeholder tokens. Raises :class:`RequestError` for one that the model does not take."""
        if not self.family.places_images:
            raise RequestError("At most 0 image(s) may be provided in one prompt.")
        try:
            return self.family.count(width, height)
        except ImageSizeError as error:
            raise RequestError(f"Failed to apply the image processor of {self.family.name}: {error}") from error

    def render(self, messages: list[dict[str, Any]], body: msgspec.Struct) -> str:
        """Return the text of a chat, with the fields of its ``body``. Raises :class:`RequestError`."""
        try:
            return self.prompter.render(messages, **render_arguments(msgspec.structs.asdict(body)))
        except TemplateError as error:
            raise RequestError(str(error)) from error

    def prompt(
        self, body: Mapping[str, Any], images: Sequence[tuple[str, int]]
    ) -> tuple["array[int]", tuple[Media, ...]]:
        """Return token ids and media of a chat; ``images`` as for :meth:`expand`. Raises :class:`RequestError`."""
        return self._placed(images, lambda parts: self.prompter.prompt(body, parts))

    def expand(
        self, text: str, images: Sequence[tuple[str, int]], *, add_special_tokens: bool
    ) -> tuple["array[int]", tuple[Media, ...]]:
        """Return token ids and media of a prompt; ``images`` are (identifier, token count) in prompt order. Raises
        :class:`RequestError`.
        """
        return self._placed(
            images, lambda parts: self.prompter.expand(text, parts, add_special_tokens=add_special_tokens)
        )

    def _placed(
        self, images: Sequence[tuple[str, int]], expand: Callable[[list[PromptImage]], Expanded]
    ) -> tuple["array[int]", tuple[Media, ...]]:
        # The prompter passes 32 bytes per image through: here the image's number.
        parts = [PromptImage(identity=n.to_bytes(32, "big"), count=count) for n, (_, count) in enumerate(images)]
        try:
            expanded = expand(parts)
        except (TemplateError, PlaceholderError, NotModelledError, PromptTooLongError) as error:
            raise RequestError(str(error)) from error
        media = (
            Media(images[int.from_bytes(span.identity, "big")][0], span.offset, span.length) for span in expanded.spans
        )
        return expanded.ids, tuple(sorted(media, key=lambda item: item.offset))


def find_folder(model: str, revision: str | None) -> Path:
    """Return the folder of a model argument: a path, or a snapshot in the hub's cache.

    Raises ``ValueError``, and ``OSError`` of a download (:mod:`mmrouter_sim.core.hub`).
    """
    path = Path(model)
    if path.is_dir():
        return path
    if snapshot := hub.cached(model, revision) or hub.download(model, revision):
        return snapshot
    raise ValueError(f"model {model!r} is neither a folder nor in the hub's cache, and HF_ENDPOINT names no mirror")


def load(
    name: str, folder: Path, *, chat_template: str | None, processor: Mapping[str, Any], engine: EngineType = "vllm"
) -> Model:
    """Load a model folder. Raises ``ValueError`` or ``OSError`` if it cannot be served."""
    unknown = sorted(set(processor) - {"min_pixels", "max_pixels", "num_crops"})
    if unknown:
        raise ValueError(f"--mm-processor-kwargs: {unknown[0]!r} is not simulated")
    config = _read(folder / "config.json")
    family = families.load_family(folder, Limits(**processor))
    if family is None:
        loaded = load_text_prompter(engine, folder, chat_template)
        if not isinstance(loaded, Prompter):
            raise ValueError(f"{folder}: prompts by mistral_common or oss-harmony are not simulated")
        prompter, family = loaded, loaded.family
    else:
        prompter = PROMPTERS[engine].load(folder, chat_template=chat_template, family=family)
        family = prompter.family
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
    ids: list[int] = []
    for values in (_read(folder / "generation_config.json"), config, config.get("text_config") or {}):
        value = values.get("eos_token_id")
        ids += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    token = _read(folder / "tokenizer_config.json").get("eos_token")
    number = tokenizer.token_to_id(token["content"] if isinstance(token, dict) else token) if token else None
    return tuple(dict.fromkeys([*ids, number] if number is not None else ids))


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


_SPACES = ("\u0120", "\u2581")  # how byte-level BPE and SentencePiece write a leading space
_WORDS = 1024
_SEARCHED = 40_000  # ids; frequent words have low ones


def _word(text: str) -> bool:
    return text.isascii() and text.isalpha() and 3 <= len(text) <= 10


class AnswerGenerator:
    """Returns a sampler for each request: pseudo text, a function of the prompt and the seed only. Equal prompts get
    equal answers on every engine, as with greedy decoding. The words are single tokens, so an answer in the next turn
    of a chat is tokenized into the same ids, and its blocks are found again.
    """

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int], *, seed: int, mean_tokens: int) -> None:
        """Raises ``ValueError`` for answers shorter than a token, or a tokenizer without an ordinary token."""
        if mean_tokens < 1:
            raise ValueError("the mean length of an answer must be at least 1 token")
        self._stop = stop_ids[0] if stop_ids else None
        self._tokenizer = tokenizer
        self._seed, self._mean = seed, mean_tokens
        self._words: list[int] = []  # after a space
        self._openers: list[int] = []  # that begin an answer
        special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        plain: list[int] = []
        for number in range(min(tokenizer.get_vocab_size(), _SEARCHED)):
            token = tokenizer.id_to_token(number)
            if token is None or number in special:
                continue
            plain.append(number)
            if not token.isascii() and token.startswith(_SPACES) and _word(token[1:]) and token[1:].islower():
                self._words.append(number)
            elif _word(token) and token.istitle():
                self._openers.append(number)
            if len(self._words) >= _WORDS and self._openers:
                break
        # A vocabulary without such words, such as one of bytes, is used as it is.
        self._words = self._words or plain
        self._openers = self._openers[:_WORDS] or self._words
        if not self._words:
            raise ValueError("the tokenizer has no ordinary token to answer with")

    def fixed(self, text: str) -> Sampler:
        """Return a given answer, which ends where its text does. Raises :class:`FormError` where no tokens have it."""
        tokens = self._tokenizer.encode(text, add_special_tokens=False).ids
        if self._tokenizer.decode(tokens) != text:
            raise FormError(f"the simulator has no tokens for {text[:40]!r}")

        def sample(position: int) -> int:
            return tokens[position] if position < len(tokens) or self._stop is None else self._stop

        return sample

    def sampler(self, ids: "array[int]", media: Iterable[Media], *, min_tokens: int = 0, ends: bool = True) -> Sampler:
        """Return the answer to a prompt. ``ends=False``: it has no end of its own (``ignore_eos``)."""
        digest = hashlib.blake2b(ids.tobytes(), key=str(self._seed).encode(), digest_size=16)
        for item in media:
            digest.update(f"{item.identifier}@{item.offset}".encode())
        rng = random.Random(digest.digest())
        length = max(rng.randint(max(1, self._mean // 2), self._mean + self._mean // 2), min_tokens)
        tokens = [rng.choice(self._openers)]

        def sample(position: int) -> int:
            if ends and self._stop is not None and position >= length:
                return self._stop
            while len(tokens) <= position:
                tokens.append(rng.choice(self._words))
            return tokens[position]

        return sample
