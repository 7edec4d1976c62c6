"""A prepared request: its images, token ids, spans and block keys; and its body as an engine receives it."""

import secrets
from array import array
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Final, TypeVar

import orjson

from mmrouter_lib.block_keys import Span, block_keys
from mmrouter_lib.engines.base import request_fields
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.base.answer_takeover import Way
from mmrouter_lib.media_identity import Modality, to_wire
from mmrouter_lib.prompt import PromptImage
from mmrouter_lib.video_header import VideoHeader
from mmrouter_router.fleet.workers import KeyForm
from mmrouter_router.http.engine_connection import Body
from mmrouter_router.intake import ChatRequest
from mmrouter_router.intake.field_check import Exactness
from mmrouter_router.media.content import Media
from mmrouter_router.sentinels.evidence import SentinelStore
from mmrouter_router.sentinels.table import FilledPrompt, Scope, Values, fill_sentinels


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """One image, video or audio of a request: its position, its bytes, and its identity and tokens for the engine.

    ``unresolved``: why its tokens (``cause:field``) are unknown; its size and token count are then estimates.
    ``video``: a resolved video's header. ``modelled``: whether the family has its modality on the engine.
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
    modality: Modality = "image"
    video: VideoHeader | None = None
    modelled: bool = True
    padding: tuple[int, int] | None = None  # pixels that the engine pads it to
    published: bytes = b""  # what the engine's events name it by, where that is not ``identity``

    @property
    def resolved(self) -> bool:
        return not self.unresolved

    @property
    def name(self) -> bytes:
        """The identity in the prompt's blocks, where the image is resolved."""
        return self.published or self.identity

    def in_prompt(self) -> PromptImage:
        """Return the image for the prompt; an unresolved one is random, because no block from it on may match."""
        identity = self.name if self.resolved else secrets.token_bytes(32)
        video = self.video if self.resolved else None
        return PromptImage(identity, self.tokens, (self.width, self.height), self.modality, video)


@dataclass
class Prepared:
    """A request that is ready to be placed; ``ids`` and ``spans`` are empty where the prompt is not predicted.

    ``others``: token ids of the prompts of a completion behind its first one, each a request inside the engine.
    ``images``: the images, then videos and audio, whose bytes are in the body already.
    """

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
    may_have_states: bool = False  # of the model: ``Family.may_have_states``
    unseen: bool = False  # prediction skipped because the policy ignores the prompt
    adapter: str = ""  # name of the LoRA adapter that answers, empty for the model itself
    others: "tuple[array[int], ...]" = ()
    hidden: tuple[str, ...] = ()  # layers of the model whose evictions the engine does not tell: ``hidden_groups``
    first_release: tuple[int, ...] = ()  # of the engines that make this prompt, empty: all
    holder: str = ""  # uid of the only pod that can answer: its engine stores the response that the request continues
    pools: frozenset[str] = frozenset()  # the only pools that may answer, empty: all
    _keys: dict[KeyForm, "array[int]"] = field(default_factory=dict)
    _other_keys: dict[KeyForm, "tuple[array[int], ...]"] = field(default_factory=dict)
    _filled: dict[Scope, FilledPrompt] = field(default_factory=dict)

    def keys(self, block_size: int, scope: Scope | None = None, lookahead: int = 0) -> "array[int]":
        """Return the keys of the complete blocks for engines of a form (:data:`KeyForm`); cached."""
        keys = self._keys.get((block_size, scope, lookahead))
        if keys is None:
            if not self.ids:
                keys = array("Q")
            elif scope is None:
                keys = block_keys(self.ids, block_size, self.spans, self.seed, lookahead)
            else:
                keys = block_keys(self.filled(scope).ids, block_size, (), self.seed, lookahead)
            self._keys[block_size, scope, lookahead] = keys
        return keys

    def other_keys(self, block_size: int, scope: Scope | None = None, lookahead: int = 0) -> "tuple[array[int], ...]":
        """Return the keys of each prompt of ``others``, as :meth:`keys`; cached."""
        if not self.others:
            return ()
        keys = self._other_keys.get((block_size, scope, lookahead))
        if keys is None:
            prompts = self.others if scope is None else [array("Q", ids) for ids in self.others]
            keys = tuple(block_keys(ids, block_size, (), self.seed, lookahead) for ids in prompts)
            self._other_keys[block_size, scope, lookahead] = keys
        return keys

    def all_keys(self, block_size: int, scope: Scope | None = None, lookahead: int = 0) -> "list[array[int]]":
        """Return the keys of each prompt."""
        form = block_size, scope, lookahead
        return [self.keys(*form), *self.other_keys(*form)]

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return len(self.ids) + sum(map(len, self.others))

    def filled(self, scope: Scope) -> FilledPrompt:
        """Return the prompt with the sentinels of a scope, as far as they were known at the first call."""
        filled = self._filled.get(scope)
        if filled is None:
            store, images = self.sentinels, {image.name: image for image in self.images if image.resolved}

            def values(identity: bytes) -> Values | None:
                image = images.get(identity)  # None for an unresolved image, whose identity here is random
                return store.values(scope, identity, image.media.data) if store is not None and image else None

            filled = self._filled[scope] = fill_sentinels(self.ids, self.spans, values)
        return filled

    def timed_rewrites(self) -> list[ImageRewrite]:
        """Return the identities for the engine of videos and audio, whose bytes are in the body already."""
        timed = [image for image in self.images if image.modality != "image" and image.modelled]
        return [ImageRewrite(item.message, item.part, NO_URL, to_wire(item.identity)) for item in timed]

    def exactness_for(self, scope: Scope | None) -> tuple[Exactness, tuple[str, ...]]:
        """Return how exactly the prompt is predicted for engines of a scope, and the reasons against exactness."""
        if scope is not None and self.exactness != "affinity" and (unknown := self.filled(scope).unknown) is not None:
            for image in self.images:  # without the unresolved ones, which are reasons already
                if image.name == self.spans[unknown].identity:
                    return "partial", (*self.reasons, f"learning:{image.param}")
        return self.exactness, self.reasons


T = TypeVar("T")
CHAT = request_fields.CHAT
_SECRET: Final = secrets.token_hex(16)  # makes placeholders unguessable, so that none occurs in a client's text
NO_URL: Final = ""  # an image's URL until its way to the engine is chosen, because encoding megabytes as base64 is slow

Place = tuple[int, int]  # indices of message and part


@dataclass(frozen=True)
class OutgoingImage:
    """One image part of a chat."""

    message: int
    part: int
    uuid: str
    media: Media
    tokens: int = 0  # visual tokens, 0 where unknown

    @property
    def place(self) -> Place:
        return self.message, self.part

    @property
    def placeholder(self) -> str:
        """Stands for the URL in a body that is sent in pieces."""
        return f"{_SECRET}.{self.message}.{self.part}"

    @cached_property
    def url(self) -> str:
        return self.media.data_uri()

    def rewrite(self, url: str = NO_URL) -> ImageRewrite:
        return ImageRewrite(self.message, self.part, url, self.uuid)


async def run_inline(work: Callable[..., T], *arguments: Any) -> T:
    return work(*arguments)


@dataclass
class Outgoing:
    """A request for ``path`` whose image URLs are still empty. ``images``: in prompt order.

    ``way``: how its stream is continued; one of ``token_ids`` contains ids that the client did not request. ``run``:
    calls the functions that write a large body, outside the event loop. ``form``: content type and body of a form.
    """

    path: str
    fields: Mapping[str, Any]
    images: tuple[OutgoingImage, ...] = ()
    way: Way | None = None
    form: tuple[str, Body] | None = None
    run: Callable[..., Awaitable[Any]] = run_inline

    async def whole(self) -> bytes:
        """Return :attr:`plain`, written outside the event loop if it is large."""
        body: bytes = await self.run(lambda: self.plain)
        return body

    async def written(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None] | None = None) -> Body:
        """Return :meth:`pieces`, made outside the event loop if they are large; of a form its body."""
        if self.form is not None:
            return self.form[1]
        pieces: Body = await self.run(self.pieces, fields, urls)
        return pieces

    @cached_property
    def plain(self) -> bytes:
        """The body for an engine that encodes and prefills itself: all images by their bytes."""
        return self.body(self.fields)

    def body(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None] | None = None) -> bytes:
        """Return ``fields`` as JSON. ``urls``: place -> URL, ``None``: known by its uuid; other images as bytes."""
        return orjson.dumps(self.with_images(fields, urls or {}))

    def pieces(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None] | None = None) -> Body:
        """Return what :meth:`body` returns, in pieces; the client's own base64 is a piece that is not copied."""
        urls = urls or {}
        uncopied = [image for image in self.images if image.place not in urls and image.media.text]
        if not uncopied:
            return self.body(fields, urls)
        placeholders = {image.place: image.placeholder for image in uncopied}
        tail = orjson.dumps(self.with_images(fields, {**urls, **placeholders}))
        pieces: list[bytes | memoryview] = []
        for image in uncopied:  # in prompt order, which is the order in the body
            before, _, tail = tail.partition(image.placeholder.encode())
            pieces += (before, f"data:{image.media.mime};base64,".encode(), image.media.text)
        return (*pieces, tail)

    def with_images(self, fields: Mapping[str, Any], urls: Mapping[Place, str | None]) -> Mapping[str, Any]:
        """Return a copy of a chat with all URLs; it shares unchanged parts with ``fields``, which is not modified."""
        if not self.images:
            return fields
        messages = list(fields["messages"])
        for place, url in {**urls, **{i.place: i.url for i in self.images if i.place not in urls}}.items():
            message, part = place
            content = messages[message]["content"]
            if content is fields["messages"][message]["content"]:
                messages[message] = {**messages[message], "content": (content := list(content))}
            options = content[part].get("image_url") or {}
            content[part] = {**content[part], "image_url": None if url is None else {**options, "url": url}}
        return {**fields, "messages": messages}
