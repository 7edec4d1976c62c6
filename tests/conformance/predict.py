"""A chat request -> what the library says the engine will do with it: the ids, the spans and the block keys."""

from array import array
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from conformance.workload import Case

from mmrouter_lib import families
from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.vllm.request import rewrite_chat
from mmrouter_lib.families import Family
from mmrouter_lib.image_size import probe
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.prompt import Prompter, PromptImage, render_arguments

KEY = bytes(range(32))
MAX_PIXELS = 64_000_000


@dataclass(frozen=True)
class Predicted:
    """``ids`` and ``spans`` of the expanded prompt, and the seed of its chain.

    ``filled``: the ids as an engine has them that writes images' identities into them, in place of the spans.
    """

    ids: "array[int]"
    spans: tuple[Span, ...]
    seed: int
    filled: "array[int] | None" = None


@dataclass(frozen=True)
class Predictor:
    """The library's prediction for one model folder. The fields are what the deliberate breaks replace."""

    family: Family
    prompter: Prompter
    model: str
    block_size: int
    key: bytes = KEY
    swapped: bool = False

    @classmethod
    def load(cls, model_dir: Path, block_size: int) -> Self:
        family = families.load_family(model_dir, None)
        assert family is not None, f"{model_dir} is of no family that is modelled"
        return cls(family, Prompter.load(model_dir, family=family), model_dir.name, block_size)

    def of_family(self, model_dir: Path) -> Self:
        """Return this predictor with another model's image geometry, as a wrong family would count."""
        family = families.load_family(model_dir, None)
        assert family is not None
        return replace(self, family=family)

    def predict(self, case: Case) -> Predicted:
        """Raises a ``ValueError`` of the library for a request that it refuses."""
        images = [self._image(url) for _, _, url in image_places(case)]
        text = self.prompter.render(case.body["messages"], **render_arguments(case.body))
        expanded = self.prompter.expand(text, list(reversed(images)) if self.swapped else images)
        return Predicted(expanded.ids, expanded.spans, self.seed(case.salt))

    def request(self, case: Case) -> dict[str, Any]:
        """Return the body that the engine is sent, with our identity beside every image."""
        rewrites = [
            ImageRewrite(at, number, url, to_wire(self._identity(decode(url))))
            for at, number, url in image_places(case)
        ]
        return rewrite_chat(case.body, rewrites, model=self.model, cache_salt=case.salt).body

    def seed(self, salt: str | None) -> int:
        return namespace_seed(self.key, model=self.model, salt=salt)

    def keys(self, predicted: Predicted, answered: Sequence[int] = ()) -> "array[int]":
        """Return the keys of the complete blocks of the prompt, and of those that ``answered`` tokens fill."""
        if predicted.filled is not None:
            return block_keys(predicted.filled + array("Q", answered), self.block_size, (), predicted.seed)
        ids = predicted.ids + array("I", answered)
        return block_keys(ids, self.block_size, predicted.spans, predicted.seed)

    def _image(self, url: str) -> PromptImage:
        data = decode(url)
        size = probe(data, max_pixels=MAX_PIXELS, exif=self.family.rotates_exif)
        return PromptImage(self._identity(data), self.family.count(size.width, size.height))

    def _identity(self, data: bytes) -> bytes:
        return media_identity(data, self.family.pixel_options, key=self.key)


def image_places(case: Case) -> list[tuple[int, int, str]]:
    """Return message number, part number and URL of every image, in prompt order."""
    return [
        (at, number, part["image_url"]["url"])
        for at, message in enumerate(case.body["messages"])
        for number, part in enumerate(message["content"])
        if isinstance(part, dict) and part["type"] == "image_url"
    ]


def decode(url: str) -> bytes:
    return b64decode(url.partition(",")[2])
