"""A parsed request -> token ids, spans and how exactly we know them.

These are the stages media, identity and prompt of docs/architecture.md.
"""

import asyncio
import secrets
from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from mmrouter_lib.block_keys import Span, block_keys, namespace_seed
from mmrouter_lib.engines.base.request import ImageRewrite
from mmrouter_lib.engines.vllm.request import rewrite_chat
from mmrouter_lib.families import Family, ImageSizeError, is_proved, load_family
from mmrouter_lib.image_size import ImageHeaderError, TooManyPixels, claimed_size, probe
from mmrouter_lib.media_identity import media_identity, to_wire
from mmrouter_lib.model_folder import read_json
from mmrouter_lib.prompt import PlaceholderError, Prompter, PromptImage, TemplateError
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.settings import Settings
from mmrouter_router.core.types import Exactness, Scope
from mmrouter_router.intake import ChatRequest, Reason
from mmrouter_router.media import Media, MediaResolver
from mmrouter_router.request.renderer_client import Renderer, RendererError
from mmrouter_router.sentinels import FilledPrompt, SentinelStore, Values, fill_sentinels, sha256_of
from mmrouter_router.telemetry.tracing import stage

PROBE_CACHE = 4096
SEEDS = 4096
"""Tenants whose namespaces are kept; of others they are worked out for each request."""
IN_THREAD = 256 * 1024
"""Bytes from which SHA-256, 0.6 ms per MiB on one core, is not computed in the event loop."""
_SPOIL_IMAGES = frozenset({"processor_options"})
"""Causes that change what images become and leave the text alone: they make every image of the request unresolved."""


@dataclass(frozen=True, slots=True)
class ResolvedImage:
    """One image of a request: where its part stands, its bytes and what they are to the engine.

    ``unresolved`` says why we cannot know what the engine makes of it, as a decision's reason (``cause:field``); it is
    empty for an image that is predicted. The size and the token count of an unresolved image are estimates.
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
        """Whether its blocks are predicted."""
        return not self.unresolved

    def in_prompt(self) -> PromptImage:
        """Return what the prompt is expanded with.

        An unresolved image stands there under a value that nothing else has. Keys are chained, so every block from the
        one in which it starts equals nothing, not even itself the next time; the blocks before it still count.
        """
        return PromptImage(self.identity if self.resolved else secrets.token_bytes(32), self.tokens)


@dataclass
class Prepared:
    """A request that is ready to be placed; no ``ids`` and no ``spans`` where the prompt could not be predicted."""

    request: ChatRequest
    salt: str | None
    images: tuple[ResolvedImage, ...]
    ids: "array[int]"
    spans: tuple[Span, ...]
    exactness: Exactness
    reasons: tuple[str, ...]
    seed: int
    fingerprint: int
    sentinels: SentinelStore | None = None  # where the engine puts identity into the ids
    rendered: bool = False  # ids and spans are a renderer's, not our own
    unseen: bool = False  # nobody has looked at the prompt: the policy does not depend on it
    _keys: dict[tuple[int, Scope | None], "array[int]"] = field(default_factory=dict)
    _filled: dict[Scope, FilledPrompt] = field(default_factory=dict)

    def keys(self, block_size: int, scope: Scope | None = None) -> "array[int]":
        """Keys of the complete blocks at this block size, for engines of this scope; computed once for each.

        ``scope`` is ``None`` where ids and spans are the same to every engine.
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
        """The prompt as engines of this scope have it, as far as we knew their sentinels when first asked."""
        filled = self._filled.get(scope)
        if filled is None:
            known, images = self.sentinels, {image.identity: image for image in self.images if image.resolved}

            def values(identity: bytes) -> Values | None:
                image = images.get(identity)  # an unresolved one stands in the prompt under another value
                return known.values(scope, identity, image.media.data) if known is not None and image else None

            filled = self._filled[scope] = fill_sentinels(self.ids, self.spans, values)
        return filled

    def exactness_for(self, scope: Scope | None) -> tuple[Exactness, tuple[str, ...]]:
        """How exactly the prompt is known for engines of this scope, and why not more exactly."""
        if scope is None or self.exactness == "affinity" or (unknown := self.filled(scope).unknown) is None:
            return self.exactness, self.reasons
        identity = self.spans[unknown].identity
        param = next((image.param for image in self.images if image.identity == identity), None)
        if param is None:  # unresolved, which is one of the reasons
            return self.exactness, self.reasons
        return "partial", (*self.reasons, f"learning:{param}")


class Preparer:
    """What is fixed for a deployment: family, template, tokenizer, identity key, limits."""

    def __init__(self, settings: Settings, media: MediaResolver) -> None:
        self.sentinels: SentinelStore | None = None
        """What is known of them, for engines that put identity into the ids."""
        self.renderer: Renderer | None = None
        """Where prompts of a family that is not modelled come from."""
        spec, model_dir = settings.deployment.spec, settings.model_dir
        self._deployment = settings.deployment
        self._identity_key = settings.identity_key
        self._media = media
        self._max_pixels = spec.routing.media.max_pixels
        model_type = str(read_json(model_dir, "config.json").get("model_type", "unknown"))
        claimed = is_proved(model_type, spec.engine.type)
        self.family: Family | None = load_family(model_dir, spec.engine.processor) if claimed else None
        """``None`` also for one that is modelled, but not proved to be what this engine makes of it."""
        self.prompter: Prompter | None = None
        self.unknown_family = "" if self.family is not None else model_type
        if self.family is not None:
            template = settings.chat_template.read_text() if spec.engine.chat_template is not None else None
            self.prompter = Prompter.load(model_dir, chat_template=template, family=self.family)
        self._seeds: dict[str | None, int] = {}
        self._known: OrderedDict[bytes, tuple[int, int, int, bool]] = OrderedDict()

    def seed(self, salt: str | None) -> int:
        """The namespace seed of a tenant's chains."""
        seed = self._seeds.get(salt)
        if seed is None:
            model = self._deployment.spec.model
            seed = namespace_seed(self._identity_key, model=model.id, revision=model.revision, salt=salt)
            if len(self._seeds) < SEEDS:
                self._seeds[salt] = seed
        return seed

    async def prepare(
        self, request: ChatRequest, salt: str | None, tenant: str = "", *, predict: bool = True
    ) -> Prepared:
        """Resolve images and predict the prompt. Raises :class:`RequestError` that names the field.

        ``predict``: false where nobody asks for the prompt yet; then it is ``affinity``, and the cause ``policy``.
        """
        images = _spoiled(request, await self._resolve(request, tenant))
        await self._digest(images)
        return await self.foresee(request, images, salt, predict=predict)

    async def foresee(
        self, request: ChatRequest, images: tuple[ResolvedImage, ...], salt: str | None, *, predict: bool = True
    ) -> Prepared:
        """Predict the prompt of a request whose images are known. Raises what :meth:`prepare` raises."""
        unresolved = tuple(image.unresolved for image in images if not image.resolved)
        # What an image becomes changes nothing where there is none.
        labels = [_label(r) for r in request.inexact if images or r.reason not in _SPOIL_IMAGES]
        reasons = list(dict.fromkeys((*labels, *unresolved)))
        exactness: Exactness = "partial" if unresolved else "exact"
        if any(reason.reason not in _SPOIL_IMAGES for reason in request.inexact):
            exactness = "affinity"
        unseen = not predict and exactness != "affinity" and not (self.family is not None and self.family.fragile)
        if unseen:
            exactness = "affinity"
            reasons.append("policy:routing.policy")
        ids, spans = array("I"), tuple[Span, ...]()
        with stage("prompt") as told:
            if unseen:
                pass
            elif self.prompter is None:
                rendered = await self._rendered(request, images, reasons) if exactness == "exact" else None
                if rendered is None:
                    exactness = "affinity"
                    reasons.append(f"family:{self.unknown_family}")
                else:
                    ids, spans = rendered
                    images = _counted(images, spans)
            elif exactness != "affinity":
                ids, spans = self._predict(request, images)
            elif self.family is not None and self.family.fragile:
                self._protect(request, images)
            if told:
                told.tell({"mmrouter.prompt_tokens": len(ids), "mmrouter.images": len(images)})
        fingerprint = self._fingerprint(request, images)
        reason = tuple(reasons)
        seed = self.seed(salt)
        theirs = self.prompter is None and exactness != "affinity"
        return Prepared(
            request, salt, images, ids, spans, exactness, reason, seed, fingerprint, self.sentinels, theirs, unseen
        )

    async def _rendered(
        self, request: ChatRequest, images: tuple[ResolvedImage, ...], reasons: list[str]
    ) -> tuple["array[int]", tuple[Span, ...]] | None:
        """Return ids and spans from a renderer, ``None`` where none answers; ``reasons`` says which of both it was."""
        if self.renderer is None:
            return None
        spec = self._deployment.spec
        rewrites = [ImageRewrite(i.message, i.part, i.media.data_uri(), to_wire(i.identity)) for i in images]
        served = spec.model.served_name or self._deployment.metadata.name
        body = rewrite_chat(request.body, rewrites, model=served, cache_salt=None).body
        try:
            ids, spans = await self.renderer.render(body)
        except RendererError as error:
            reasons.append(f"renderer_{error.cause}:{self.unknown_family}")
            return None
        if sorted(span.identity for span in spans) != sorted(image.identity for image in images):
            reasons.append(f"renderer_unusable:{self.unknown_family}")
            return None
        reasons.append(f"renderer:{self.unknown_family}")
        return ids, spans

    def _protect(self, request: ChatRequest, images: tuple[ResolvedImage, ...]) -> None:
        """Refuse what could end the engine: images out of order, also where the prompt itself is not predicted."""
        unseen = [part for part in request.media if part.kind == "image"]
        if len(unseen) > 1:  # of a forwarded path, which renders prompts by rules of its own
            message = "This model takes several images only in chat completions."
            raise RequestError.invalid(message, param=unseen[1].param, code="too_many_images")
        try:
            self._predict(request, images)
        except RequestError as error:
            if isinstance(error.__cause__, PlaceholderError):
                raise

    def _predict(
        self, request: ChatRequest, images: tuple[ResolvedImage, ...]
    ) -> tuple["array[int]", tuple[Span, ...]]:
        """Return token ids and spans of the expanded prompt."""
        assert self.prompter is not None
        try:
            text = self.prompter.render(
                request.messages,
                tools=request.tools,
                documents=request.documents,
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                chat_template_kwargs=request.chat_template_kwargs,
            )
            expanded = self.prompter.expand(
                text, [image.in_prompt() for image in images], add_special_tokens=request.add_special_tokens
            )
        except (TemplateError, PlaceholderError) as error:
            message = str(error)
            raise RequestError.invalid(
                f"{message[0].upper()}{message[1:]}.", param="messages", code="invalid_value"
            ) from error
        return expanded.ids, expanded.spans

    async def _resolve(self, request: ChatRequest, tenant: str) -> tuple[ResolvedImage, ...]:
        if not request.images and not request.media:
            return ()
        media = await self._media.resolve_all([*request.images, *request.media], tenant=tenant)
        for part, item in zip(request.media, media[len(request.images) :], strict=True):
            part.embed(item.data_uri())
        return tuple(
            self._image(part.message, part.part, part.param, item)
            for part, item in zip(request.images, media[: len(request.images)], strict=True)
        )

    async def _digest(self, images: tuple[ResolvedImage, ...]) -> None:
        """Hash what sentinels may follow from, before a decision needs them; where it takes long, in a thread."""
        for image in images:
            if self.sentinels is not None and self.sentinels.wants_digest(image.identity):
                data = image.media.data
                hashed = sha256_of(data) if len(data) < IN_THREAD else await asyncio.to_thread(sha256_of, data)
                self.sentinels.set_digest(image.identity, hashed)

    def _image(self, message: int, part: int, param: str, media: Media) -> ResolvedImage:
        family = self.family
        options: Mapping[str, Any] = family.pixel_options if family is not None else {}
        identity = media_identity(media.data, options, key=self._identity_key)
        known = self._known.get(identity)
        if known is None:
            known = self._known[identity] = self._size(media.data, param)
            if len(self._known) > PROBE_CACHE:
                self._known.popitem(last=False)
        width, height, tokens, sure = known
        unresolved = "" if sure else f"image_format:{param}"
        return ResolvedImage(message, part, param, media, identity, width, height, tokens, unresolved)

    def _size(self, data: bytes, param: str) -> tuple[int, int, int, bool]:
        """Return width, height, tokens and whether they are what the engine will find."""
        family = self.family
        try:
            size = claimed_size(data, max_pixels=self._max_pixels)
            sure = size is None
            if size is None:
                exif = family is not None and family.rotates_exif
                size = probe(data, max_pixels=self._max_pixels, exif=exif)
            return size.width, size.height, family.count(size.width, size.height) if family is not None else 0, sure
        except (ImageHeaderError, TooManyPixels, ImageSizeError) as error:
            raise RequestError.invalid(
                f"The image cannot be used: {error}.", param=param, code="invalid_image"
            ) from error

    @staticmethod
    def _fingerprint(request: ChatRequest, images: tuple[ResolvedImage, ...]) -> int:
        """A hash of how the conversation begins: its first two messages and their images. Turns of it share it."""
        head = []
        for message in request.messages[:2]:
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content or ()]
            head.append((message.get("role"), texts))
        raw = orjson.dumps(head)
        for image in images:
            if image.message < 2:
                raw += image.identity
        return xxh3_64_intdigest(raw)


def _spoiled(request: ChatRequest, images: tuple[ResolvedImage, ...]) -> tuple[ResolvedImage, ...]:
    """Return the images, all unresolved where a field of the request changes what images become."""
    cause = next((_label(reason) for reason in request.inexact if reason.reason in _SPOIL_IMAGES), "")
    return tuple(replace(image, unresolved=image.unresolved or cause) for image in images) if cause else images


def _counted(images: tuple[ResolvedImage, ...], spans: tuple[Span, ...]) -> tuple[ResolvedImage, ...]:
    """Return the images with the token counts that a renderer gave them."""
    tokens = {span.identity: span.length for span in spans}
    return tuple(replace(image, tokens=tokens[image.identity]) for image in images)


def _label(reason: Reason) -> str:
    return f"{reason.reason}:{reason.field}"
