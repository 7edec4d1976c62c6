"""A prepared request: its images, token ids and spans, and the block keys derived from them."""

import secrets
from array import array
from dataclasses import dataclass, field

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.prompt import PromptImage
from mmrouter_router.core.types import Exactness, Scope
from mmrouter_router.intake import ChatRequest
from mmrouter_router.media import Media
from mmrouter_router.sentinels import FilledPrompt, SentinelStore, Values, fill_sentinels


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """One image of a request: its position, its bytes, and its identity and tokens for the engine.

    ``unresolved``: the reason (``cause:field``) why its tokens in the engine are unknown, empty for a predicted image.
    Size and token count of an unresolved image are estimates.
    """

    message: int
    part: int
    param: str
    media: Media
    identity: bytes
    width: int
    height: int
    tokens: int
    unresolved: str = ""

    @property
    def resolved(self) -> bool:
        return not self.unresolved

    def in_prompt(self) -> PromptImage:
        """Return the image for the expansion of the prompt.

        An unresolved image gets a random identity. Keys are chained, so all blocks from its first one on match nothing,
        not even a repetition of the request; the blocks before it still match.
        """
        return PromptImage(self.identity if self.resolved else secrets.token_bytes(32), self.tokens)


@dataclass
class Prepared:
    """A request that is ready to be placed; ``ids`` and ``spans`` are empty where the prompt is not predicted."""

    request: ChatRequest
    salt: str | None
    images: tuple[ResolvedImage, ...]
    ids: "array[int]"
    spans: tuple[Span, ...]
    exactness: Exactness
    reasons: tuple[str, ...]
    seed: int
    fingerprint: int
    sentinels: SentinelStore | None = None  # for engines that put image identities into the ids
    rendered: bool = False  # ids and spans come from a renderer
    unseen: bool = False  # prediction skipped because the policy ignores the prompt
    _keys: dict[tuple[int, Scope | None], "array[int]"] = field(default_factory=dict)
    _filled: dict[Scope, FilledPrompt] = field(default_factory=dict)

    def keys(self, block_size: int, scope: Scope | None = None) -> "array[int]":
        """Return the keys of the complete blocks for a block size and a scope of engines; cached.

        ``scope``: ``None`` where ids and spans are the same for all engines.
        """
        keys = self._keys.get((block_size, scope))
        if keys is None:
            if not self.ids:
                keys = array("Q")
            elif scope is None:
                keys = block_keys(self.ids, block_size, self.spans, self.seed)
            else:
                keys = block_keys(self.filled(scope).ids, block_size, (), self.seed)
            self._keys[block_size, scope] = keys
        return keys

    def filled(self, scope: Scope) -> FilledPrompt:
        """Return the prompt with the sentinels of a scope, as far as they were known at the first call."""
        filled = self._filled.get(scope)
        if filled is None:
            store, images = self.sentinels, {image.identity: image for image in self.images if image.resolved}

            def values(identity: bytes) -> Values | None:
                image = images.get(identity)  # None for an unresolved image, whose identity here is random
                return store.values(scope, identity, image.media.data) if store is not None and image else None

            filled = self._filled[scope] = fill_sentinels(self.ids, self.spans, values)
        return filled

    def exactness_for(self, scope: Scope | None) -> tuple[Exactness, tuple[str, ...]]:
        """Return how exactly the prompt is predicted for engines of a scope, and the reasons against exactness."""
        if scope is None or self.exactness == "affinity" or (unknown := self.filled(scope).unknown) is None:
            return self.exactness, self.reasons
        identity = self.spans[unknown].identity
        param = next((image.param for image in self.images if image.identity == identity), None)
        if param is None:  # an unresolved image, which is a reason already
            return self.exactness, self.reasons
        return "partial", (*self.reasons, f"learning:{param}")
