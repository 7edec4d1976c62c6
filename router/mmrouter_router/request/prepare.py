"""Prepares a parsed request for placement: resolves its images and predicts its token ids (docs/architecture.md)."""

import logging
import os
import sys
from array import array
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Self

import orjson
from blake3 import blake3
from xxhash import xxh3_64_intdigest

from mmrouter_lib.block_keys import Span, namespace_seed
from mmrouter_lib.engines import adapter, answering_variables
from mmrouter_lib.engines.base.adapter import ImageRewrite
from mmrouter_lib.engines.prompters import PROMPTERS, response_chat
from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.engines.vllm.adapter import VLLM
from mmrouter_lib.families import Family, ModelFolderError, family_name, is_proved, load_family
from mmrouter_lib.media_identity import to_wire
from mmrouter_lib.model_folder import read_json
from mmrouter_lib.prompt import (
    AnyPrompter,
    HarmonyPrompter,
    MistralPrompter,
    NotModelledError,
    PlaceholderError,
    PromptTooLongError,
    TemplateError,
    harmony,
)
from mmrouter_lib.prompt.segment_cache import MAX_TOKENS, MAX_WORD, NEW_TEXT, OWNER, NewTextError
from mmrouter_router.core.errors import RequestError
from mmrouter_router.core.settings import Settings
from mmrouter_router.core.worker_threads import INLINE_BYTES, WorkerThreads
from mmrouter_router.fleet.workers import KeyForm
from mmrouter_router.http.engine_requests import EngineRequestError
from mmrouter_router.intake import ChatRequest, ImagePart
from mmrouter_router.intake.field_check import Exactness
from mmrouter_router.media.resolve import MediaResolver
from mmrouter_router.request.images import ImageResolver, name_by_neighbours
from mmrouter_router.request.prepared import CHAT, Prepared, ResolvedImage
from mmrouter_router.request.processor_options import MEDIA_CAUSES, OptionReader, under_options
from mmrouter_router.request.renderer_client import ROLE as RENDERER_ROLE
from mmrouter_router.request.renderer_client import Rendered, Renderer
from mmrouter_router.request.timed_media import resolve_timed
from mmrouter_router.sentinels.evidence import SentinelStore, sha256_of
from mmrouter_router.telemetry.tracing import child_span

log = logging.getLogger("mmrouter.prepare")

Images = tuple[ResolvedImage, ...]
INLINE_TEXT = 1024
"""Characters without cached ids up to which they are tokenized in the event loop, in about 1 ms."""
MAX_TEXT = 4 * 1024**2
"""Bytes of a body without its images up to which its prompt is predicted, unless its text is too long for
:class:`mmrouter_lib.prompt.segment_cache.SegmentCache`."""
MAX_REASONS = 32  # media that are named as reasons, so that a client cannot choose how many
SEEDS = 4096  # tenants whose namespace seeds are cached


class PromptModel(NamedTuple):
    """The model's family and its prompter, ``None`` where no prompt is predicted.

    ``name``: the family's, or the ``model_type``. ``unpredicted``: why, as a decision's reason. ``hidden``: layers
    whose evictions the engine does not tell (``EngineAdapter.hidden_groups``).
    """

    family: Family | None
    prompter: AnyPrompter | None
    name: str
    unpredicted: str = ""
    hidden: tuple[str, ...] = ()

    @classmethod
    def load(cls, settings: Settings) -> Self:
        """Load them from the model folder. Raises ``ModelFolderError`` for a family with a geometry that is not usable.

        A model without a family is predicted where its texts are, unless there are renderers, which know its images.
        """
        spec, folder = settings.deployment.spec, settings.model_dir
        config, engine = read_json(folder, "config.json"), spec.engine.type
        name, hidden = family_name(config), adapter(engine).hidden_groups(config)
        family = load_family(folder, spec.engine.processor) if is_proved(name, engine) else None
        template = settings.chat_template.read_text() if spec.engine.chat_template is not None else None
        if family is not None:
            own = PROMPTERS[engine].load(folder, chat_template=template, family=family)
            return cls(own.family, own, name, hidden=hidden)
        if any(pool.role == RENDERER_ROLE for pool in spec.pools):
            return cls(None, None, name, f"family:{name}")
        try:
            prompter = load_text_prompter(engine, folder, template, _variables(settings), spec.engine.processor)
        except UnpredictedError as error:
            return cls(None, None, name, str(error))
        except ModelFolderError as error:
            log.warning("the model's prompts are not predicted: %s", error)
            return cls(None, None, name, f"model_folder:{name}")
        return cls(prompter.family, prompter, name, hidden=hidden)


def _variables(settings: Settings) -> list[dict[str, str | None]]:
    """Return the environment of each pool's engines, as far as the router knows it.

    Engines of ``mmrouter up`` have vLLM's variables of its own environment, and so do its routers.
    """
    own = {name: value for name, value in os.environ.items() if name.startswith("VLLM_")}
    return [{**own, **pool} for pool in answering_variables(settings.deployment)]


def _too_long(request: ChatRequest) -> RequestError:
    message = (
        f"This model takes at most {MAX_TEXT} bytes or {MAX_TOKENS} tokens of text, and words of {MAX_WORD} letters."
    )
    return RequestError.invalid(message, param=request.prompt_field, code="request_too_large")


class Preparer:
    """Prepares requests. ``renderer``: for families that are not modelled; ``sentinels``: for engines with them."""

    def __init__(
        self,
        settings: Settings,
        media: MediaResolver,
        model: PromptModel | None = None,
        *,
        renderer: Renderer | None = None,
        sentinels: SentinelStore | None = None,
        threads: WorkerThreads | None = None,
        key_forms: Callable[[], Collection[KeyForm]] = tuple,
        context_length: Callable[[], int] = lambda: 0,
    ) -> None:
        """``key_forms``: of the present engines, so that keys of long prompts are computed in a thread.
        ``context_length``: of the engine with the smallest context, 0 while unknown.
        """
        model = model or PromptModel.load(settings)
        self.family, self.prompter = model.family, model.prompter
        self.unknown_family = "" if model.family is not None else model.name
        self.unpredicted, self.hidden = model.unpredicted, model.hidden
        self.first_release = () if model.prompter is None else model.prompter.first_release
        engine = settings.deployment.spec.engine.type
        self.response_chat = response_chat(engine, model.prompter)
        # vLLM renders responses of these by other rules than chats; those for gpt-oss are modelled.
        other_rules = model.name == harmony.MODEL_TYPE or isinstance(model.prompter, MistralPrompter)
        self.models_responses = not other_rules or isinstance(model.prompter, HarmonyPrompter)
        self.renderer, self.sentinels = renderer, sentinels
        self._deployment, self._served_model = settings.deployment, settings.served_model
        self._identity_key = settings.identity_key
        self._media, self._threads, self._key_forms = media, threads or WorkerThreads(), key_forms
        self._context_length = context_length
        max_pixels = settings.deployment.spec.routing.media.max_pixels
        self._timed = partial(resolve_timed, family=self.family, max_pixels=max_pixels, modelled_here=engine == "vllm")
        self._rename_beside_videos = engine == "sglang"
        self._options = OptionReader.of(settings, self.family)
        self._seeds: dict[tuple[str | None, str], int] = {}
        self._images = ImageResolver(self._threads, max_pixels)

    def seed(self, salt: str | None, lora: str = "") -> int:
        """Return the seed of the keys of a tenant's prompts, for the model or one of its LoRA adapters."""
        seed = self._seeds.get((salt, lora))
        if seed is None:
            model = self._deployment.spec.model
            seed = namespace_seed(self._identity_key, model=model.id, revision=model.revision, lora=lora, salt=salt)
            if len(self._seeds) < SEEDS:
                self._seeds[salt, lora] = seed
        return seed

    def image_key(self, salt: str | None) -> bytes:
        """Return the key of a tenant's image identities. vLLM caches images by them, so tenants share no processed one.

        SGLang identifies images by their content, so the router learns one identity for all tenants.
        """
        if salt is None or self.sentinels is not None:
            return self._identity_key
        return blake3(b"images of tenant:" + salt.encode(), key=self._identity_key).digest()

    async def prepare(
        self, request: ChatRequest, salt: str | None, tenant: str = "", *, predict: bool = True
    ) -> Prepared:
        """Resolve images and, with ``predict``, predict the prompt. Raises RequestError that names the field."""
        options = self._options.read(request)
        family = options.family if options else self.family
        resolved = await self._resolve(request, self.image_key(salt), tenant, family)
        one_medium = self.family is not None and self.family.one_medium
        images = under_options(request, resolved, options, one_medium=one_medium)
        images = name_by_neighbours(images, self.family, rename_beside_videos=self._rename_beside_videos)
        await self._digest(images, tenant)
        return await self.predict(request, images, salt, tenant, predict=predict)

    async def predict(
        self, request: ChatRequest, images: Images, salt: str | None, tenant: str = "", *, predict: bool = True
    ) -> Prepared:
        """Predict the prompt of a request with resolved images. Raises what :meth:`prepare` raises."""
        unresolved = tuple(image.unresolved for image in images if not image.resolved)
        unmodelled = [f"media:{image.param}" for image in images if not image.modelled]
        affected = images and not any(image.published for image in images)
        labels = [r.label for r in request.inexact if affected or r.reason not in MEDIA_CAUSES]
        reasons = list(dict.fromkeys((*unmodelled[:MAX_REASONS], *labels, *unresolved[:MAX_REASONS])))
        exactness: Exactness = "partial" if unresolved else "exact"
        if unmodelled or any(reason.reason not in MEDIA_CAUSES for reason in request.inexact):
            exactness = "affinity"
        unseen = not predict and exactness != "affinity" and not (self.family is not None and self.family.fragile)
        if unseen:
            exactness = "affinity"
            reasons.append("policy:routing.policy")
        elif request.text_size > MAX_TEXT and exactness != "affinity":
            exactness = "affinity"
            reasons.append(f"prompt_size:{request.prompt_field}")
        ids, spans = array("I"), tuple[Span, ...]()
        others: tuple[array[int], ...] = ()
        with child_span("prompt") as span:
            if unseen:
                pass
            elif self.prompter is None:
                rendered = await self._render(request, images, reasons, tenant) if exactness == "exact" else None
                if rendered is None:
                    exactness = "affinity"
                    reasons.append(self.unpredicted)
                else:
                    ids, spans = rendered
                    images = _counted(images, spans)
            elif exactness != "affinity":
                try:
                    self._check_room(request, images)
                    (ids, spans), *more = await self._expand_off_loop(request, images, tenant)
                    others = tuple([each for each, _ in more])
                except NotModelledError as error:
                    exactness = "affinity"
                    reasons.append(error.reason)
                except PromptTooLongError as error:
                    if self.family is not None and self.family.fragile:
                        raise _too_long(request) from error
                    exactness = "affinity"
                    reasons.append(f"prompt_size:{request.prompt_field}")
            elif self.family is not None and self.family.fragile:
                await self._refuse_harmful(request, images, tenant)
            if span:
                tokens = len(ids) + sum(map(len, others))
                span.set_attributes({"mmrouter.prompt_tokens": tokens, "mmrouter.images": len(images)})
        fingerprint = await self._threads.run(tenant, request.work_size, self._fingerprint, request, images)
        lora = "" if request.model == self._served_model else request.model
        prompt = (ids, spans, exactness, tuple(reasons), self.seed(salt, lora), fingerprint)
        by_renderer = self.prompter is None and exactness != "affinity"
        states = self.family is None or self.family.may_have_states
        model = by_renderer, states, unseen, lora
        engines = self.hidden, self.first_release
        prepared = Prepared(request, salt, images, *prompt, self.sentinels, *model, others, *engines)
        await self._compute_keys(prepared, tenant)
        return prepared

    async def _compute_keys(self, prepared: Prepared, tenant: str) -> None:
        """Compute the keys of a long prompt in a thread."""
        size = prepared.tokens * prepared.ids.itemsize
        for block_size, scope, lookahead in self._key_forms() if size > INLINE_BYTES else ():
            if scope is not None:
                prepared.filled(scope)  # reads what the event loop changes
            await self._threads.run(tenant, size, prepared.all_keys, block_size, scope, lookahead)

    async def _render(self, request: ChatRequest, images: Images, reasons: list[str], tenant: str) -> Rendered | None:
        """Return ids and spans from a renderer, ``None`` where it fails; adds the reason to ``reasons``.

        Renderers render chats only.
        """
        if self.renderer is None or request.endpoint != CHAT:
            return None
        rewrites = [ImageRewrite(i.message, i.part, i.media.data_uri(), to_wire(i.identity)) for i in images]
        body = VLLM.rewrite_chat(request.body, rewrites, model=self._served_model, cache_salt=None).body
        try:
            ids, spans = await self.renderer.render(body, tenant)
        except EngineRequestError as error:
            reasons.append(f"renderer_{error.cause}:{self.unknown_family}")
            return None
        if sorted(span.identity for span in spans) != sorted(image.identity for image in images):
            reasons.append(f"renderer_unusable:{self.unknown_family}")
            return None
        reasons.append(f"renderer:{self.unknown_family}")
        return ids, spans

    def _check_room(self, request: ChatRequest, images: Images) -> None:
        """Raise ``NotModelledError`` where the engine may scale the request's images down together."""
        shown = [image for image in images if image.modality == "image"]
        if not shown or self.family is None or not self.family.scales_together:
            return
        # vLLM counts one token of its stand-in text for each recording.
        room = self._context_length() - (len(images) - len(shown))
        if not self.family.fits([image.tokens if image.resolved else None for image in shown], room):
            raise NotModelledError("the images may not fit the context", f"image_sizes:{request.prompt_field}")

    async def _refuse_harmful(self, request: ChatRequest, images: Images, tenant: str) -> None:
        """Refuse images out of order, which crash engines of some families, even without a prediction."""
        images_of_body = [part for part in request.media if part.kind == "image"]
        if len(images_of_body) > 1:  # a forwarded route renders prompts by its own rules
            message = "This model takes several images only in chat completions."
            raise RequestError.invalid(message, param=images_of_body[1].param, code="too_many_images")
        if request.text_size > MAX_TEXT:
            raise _too_long(request)
        try:
            await self._expand_off_loop(request, images, tenant)
        except PromptTooLongError as error:
            raise _too_long(request) from error
        except RequestError as error:
            if isinstance(error.__cause__, PlaceholderError):
                raise

    async def _expand_off_loop(self, request: ChatRequest, images: Images, tenant: str) -> list[Rendered]:
        size = request.work_size
        # The times of a video's frames are tokenized, and its placeholders are many.
        slow = len(request.prompts) > 1 or any(image.modality == "video" for image in images)
        if size <= INLINE_BYTES and not slow:
            try:  # a conversation whose earlier turns are cached has little new text
                return self._expand(request, images, tenant, INLINE_TEXT)
            except NewTextError:
                pass
        return await self._threads.run_in_thread(tenant, size, self._expand, request, images, tenant)

    def _expand(self, request: ChatRequest, images: Images, tenant: str, new_text: int = sys.maxsize) -> list[Rendered]:
        """Return ids and spans of the prompt; of a completion, those of each."""
        assert self.prompter is not None
        before = OWNER.set(tenant), NEW_TEXT.set(new_text)
        try:
            if request.prompts:
                add = bool(request.body.get("add_special_tokens", True))
                expanded = [self.prompter.completion(prompt, add_special_tokens=add) for prompt in request.prompts]
            else:
                # A forwarded request has no messages of its own: here they hold the beginning of its prompt.
                body = request.body if request.endpoint == CHAT else request.as_chat or {"messages": request.messages}
                expanded = [self.prompter.prompt(body, [image.in_prompt() for image in images if image.modelled])]
        except (TemplateError, PlaceholderError) as error:
            message = f"{str(error)[0].upper()}{str(error)[1:]}."
            raise RequestError.invalid(message, param=request.prompt_field, code="invalid_value") from error
        finally:
            OWNER.reset(before[0])
            NEW_TEXT.reset(before[1])
        tokens = sum(len(each.ids) for each in expanded)
        if tokens > MAX_TOKENS:
            raise PromptTooLongError(f"the prompt has {tokens} tokens")
        return [(each.ids, each.spans) for each in expanded]

    async def _resolve(self, request: ChatRequest, key: bytes, tenant: str, family: Family | None) -> Images:
        if not request.images and not request.media:
            return ()
        media = await self._media.resolve_all([*request.images, *request.media], tenant=tenant)
        images, others = media[: len(request.images)], media[len(request.images) :]
        for part, item in zip(request.media, others, strict=True):
            part.embed(await self._threads.run(tenant, len(item.data), item.data_uri))
        parts = zip(request.images, images, strict=True)
        resolved = [await self._images.resolve(part, item, key, tenant, family) for part, item in parts]
        left = MAX_TOKENS
        for part, item in zip(request.media, others, strict=True):
            if part.kind == "image" and part.place is not None:
                image = ImagePart(*part.place, part.url, part.param)
                resolved.append(await self._images.resolve(image, item, key, tenant, family))
            elif part.place is not None:
                work = partial(self._timed, part, item, key, left=left)
                resolved.append(await self._threads.run(tenant, len(item.data), work))
                left -= resolved[-1].tokens
        return tuple(resolved)

    async def _digest(self, images: Images, tenant: str) -> None:
        for image in images:
            if self.sentinels is not None and self.sentinels.wants_digest(image.identity):
                data = image.media.data
                hashed = await self._threads.run(tenant, len(data), sha256_of, data)
                self.sentinels.set_digest(image.identity, hashed)

    @staticmethod
    def _fingerprint(request: ChatRequest, images: Images) -> int:
        """Return a hash of the first two messages and their images, which all turns of a conversation share."""
        head = []
        for message in request.messages[:2]:
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [p.get("text", "") for p in content or ()]
            head.append((message.get("role"), texts))
        named = b"".join(image.identity for image in images if image.message < 2)
        return xxh3_64_intdigest(orjson.dumps(head) + named)


def _counted(images: Images, spans: tuple[Span, ...]) -> Images:
    tokens = {span.identity: span.length for span in spans}
    return tuple(replace(image, tokens=tokens[image.identity]) for image in images)
