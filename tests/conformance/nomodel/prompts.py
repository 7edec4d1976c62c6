"""Drawn requests: prefixes shared by many, conversations that grow, part and are cut, images anywhere, salts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mmrouter_lib.block_keys import Span

MOST = 2_400  # tokens of a prompt
KEPT = 40  # conversations that may be continued
PLACEHOLDER = 1029
LENGTHS = {bytes([length % 256]) * 32: length for length in (1, 2, 31, 32, 33, 64, 100, 300)}
"""Identity -> placeholder tokens: vLLM refuses an identity that comes with another length."""


@dataclass(frozen=True)
class Drawn:
    """A request. ``steps``: engine steps after which it is aborted, 0 for never."""

    ids: tuple[int, ...]
    images: tuple[Span, ...] = ()
    salt: str | None = None
    lora: str | None = None
    output: int = 1
    steps: int = 0

    def cut(self, length: int) -> "Drawn":
        return replace(self, ids=self.ids[:length], images=tuple(image for image in self.images if image.end <= length))


SHORT = (*[1] * 12, 2, 5, 40)
"""Lengths of answers, most of them short: steps take nearly all of an engine's time."""


class Prompts:
    """Draws requests for blocks of ``block_size`` tokens. ``book``: all texts are pieces of it, which compress well;
    without it, every token is drawn. ``outputs``: lengths of answers, each of whose tokens is a step of the engine.
    """

    def __init__(
        self,
        source: random.Random,
        block_size: int,
        book: Sequence[int] = (),
        outputs: Sequence[int] = (1, 1, 2, 5, 40),
    ) -> None:
        self._source, self._size, self._book, self._outputs = source, block_size, book, outputs
        self._roots = [self._text(MOST) for _ in range(4)]
        self._kept: list[Drawn] = []

    def next(self) -> Drawn:
        source = self._source
        if self._kept and source.random() < 0.6:
            chosen = source.choice(self._kept)
            length = len(chosen.ids)
            chosen = chosen.cut(source.choice([length, length, length - 1, length // 2, source.randint(1, length)]))
        else:
            root = source.choice(self._roots)
            names = {
                "salt": source.choice([None, None, None, "a", "b"]),
                "lora": source.choice([*[None] * 5, "c", "d"]),
            }
            chosen = Drawn(root[: source.randint(1, MOST)], **names)
        more = source.choice([0, 1, self._size, source.randint(1, 800)])
        chosen = replace(chosen, ids=(*chosen.ids, *self._text(more)))
        if source.random() < 0.4:
            chosen = self._with_image(chosen)
        if source.random() < 0.3:
            chosen = chosen.cut(len(chosen.ids) // self._size * self._size or len(chosen.ids))
        chosen = chosen.cut(MOST)
        aborted = source.randint(1, 3) if source.random() < 0.1 else 0
        return replace(chosen, output=source.choice(self._outputs), steps=aborted)

    def answered(self, prompt: Drawn, output: Sequence[int]) -> None:
        """Keep a conversation with its answer."""
        self._kept.append(replace(prompt, ids=(*prompt.ids, *output)))
        if len(self._kept) > KEPT:
            del self._kept[self._source.randrange(KEPT)]

    def _text(self, length: int) -> tuple[int, ...]:
        if not self._book:
            return tuple(self._source.choices(range(1000), k=length))
        begin = self._source.randrange(len(self._book) - length)
        return tuple(self._book[begin : begin + length])

    def _with_image(self, prompt: Drawn) -> Drawn:
        """Insert an image behind the last one, at any offset of a block."""
        source, first = self._source, max((image.end for image in prompt.images), default=0)
        offset = source.choice([len(prompt.ids), source.randint(first, len(prompt.ids)), first])
        identity, length = source.choice(list(LENGTHS.items()))
        image = Span(offset, length, identity)
        ids = (*prompt.ids[:offset], *[PLACEHOLDER] * image.length, *prompt.ids[offset:], *self._text(1))
        return replace(prompt, ids=ids, images=(*prompt.images, image))
