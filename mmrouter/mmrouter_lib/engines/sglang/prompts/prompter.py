"""Prompts as SGLang 0.5.23 builds them, by its own rules (docs/engine-facts/sglang.md#prompts).

Compared with the engine's own code by ``tests/conformance/sglang/test_rendering.py``.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mmrouter_lib.engines.sglang.families.internvl import SglangInternVL
from mmrouter_lib.engines.sglang.families.pixtral import SglangPixtral
from mmrouter_lib.engines.sglang.prompts.chats import content_format, reasoning, shown_chat
from mmrouter_lib.engines.sglang.prompts.conversation_form import INTERNVL, PADDLEOCR, ConversationForm
from mmrouter_lib.families import Expanded, Family, NotModelledError, PlaceholderError, PromptImage, expand_ids
from mmrouter_lib.families.gemma3 import Gemma3
from mmrouter_lib.families.gemma4 import Gemma4
from mmrouter_lib.families.glm4v import Glm4v
from mmrouter_lib.families.internvl_chat import InternVLChat
from mmrouter_lib.families.kimi_k25 import KimiK25
from mmrouter_lib.families.paddleocr import PaddleOCRVL
from mmrouter_lib.families.pixtral import Pixtral
from mmrouter_lib.families.qwen_omni import QwenOmni
from mmrouter_lib.families.qwen_vl import QwenVL
from mmrouter_lib.model_folder import find_json, has_byte_pairs
from mmrouter_lib.prompt.prompter import Prompter
from mmrouter_lib.prompt.segment_cache import PromptTooLongError
from mmrouter_lib.prompt.templates import Compiled, ContentFormat, TemplateError, Templates, compile_template
from mmrouter_lib.prompt.tokenizer import load_tokenizer, special_tokens
from mmrouter_lib.prompt.tokenizer_class import AS_FILE, as_class
from mmrouter_lib.tokenizer_code import read_tokenizer_code

_LLAMAS = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_BEGIN_TEXTS = _LLAMAS | {"CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "CohereTokenizerFast"}
_BEGIN_TEXTS |= {"GemmaTokenizer", "GemmaTokenizerFast"}
_OF_QWEN = r"<\|vision_start\|>(?:<\|image_pad\|>)+<\|vision_end\|>|<image>"
_PLACES: Mapping[type[Family], tuple[re.Pattern[str], ...]] = {
    QwenVL: (re.compile(_OF_QWEN), re.compile(r"<\|(?:image|video)_pad\|>")),
    QwenOmni: (re.compile(rf"{_OF_QWEN}|<\|audio_pad\|>"), re.compile(r"<\|(?:image|video|audio)_pad\|>")),
    Gemma3: (re.compile(r"<start_of_image>|<image_soft_token>"),),
    Gemma4: (re.compile(r"<\|(?:image|video|audio)\|>"),),
    Glm4v: (re.compile(r"<\|(?:image|video|begin_of_video)\|>"),),
    KimiK25: (re.compile(r"<\|media_pad\|>"),),
    PaddleOCRVL: (re.compile(r"<\|IMAGE_PLACEHOLDER\|>"),),
    SglangPixtral: (re.compile(r"\[IMG\]"),),
}
"""Family that the engine's processor expands -> what counts as places for media in the text of a prompt (Qwen-VL: in
its ids, too). With more of them than images the engine fails, or expands another one than the template's.
"""
_FORMS: Mapping[type[Family], ConversationForm] = {PaddleOCRVL: PADDLEOCR, InternVLChat: INTERNVL}
"""Family -> the form in which the engine writes chats where no template is given."""
_OWN_RULES: Mapping[type[Family], Callable[[Family], Family]] = {
    InternVLChat: SglangInternVL.of,
    Pixtral: SglangPixtral.of,
}
"""Family -> the same where the engine counts, places or names images by other rules than vLLM."""


@dataclass(frozen=True, slots=True)
class SglangPrompter(Prompter):
    """Renders, tokenizes and expands as SGLang does. Immutable and safe to share between threads.

    ``places``: what the engine counts as places for media in a text, empty where its own code expands the images.
    ``form``: in which the engine writes the text, ``None`` for a template.
    """

    source: str = ""
    content: ContentFormat = "openai"
    places: tuple[re.Pattern[str], ...] = ()
    form: ConversationForm | None = None

    @classmethod
    def load(
        cls, model_dir: Path, *, chat_template: str | None = None, family: Family, tokenizer: Tokenizer | None = None
    ) -> Self:
        """As :meth:`Prompter.load`. A template file loses newlines at its ends, and its ``\\n`` become newlines."""
        explicit = None if chat_template is None else chat_template.strip("\n").replace("\\n", "\n")
        config = find_json(model_dir, "tokenizer_config.json") or {}
        has_file = not has_byte_pairs(model_dir) and read_tokenizer_code(model_dir, config) is None
        if tokenizer is None and has_file:
            tokenizer = as_sglang_loads(load_tokenizer(model_dir, config), AS_FILE, config)
        form = _FORMS.get(type(family)) if chat_template is None else None
        if (rules := _OWN_RULES.get(type(family))) is not None:
            family = rules(family)
        loaded = super(SglangPrompter, cls).load(model_dir, chat_template=explicit, family=family, tokenizer=tokenizer)
        if form is not None:
            loaded = replace(loaded, templates=Templates(processor=None, tokenizer={}))
        source = _template(loaded.templates)
        compiled: dict[str, Compiled] = {source: loaded.compiled.get(source) or compile_template(source)}
        return replace(
            loaded,
            compiled=compiled,
            source=source,
            content=content_format(source),
            places=_places(family, loaded.tokenizer),
            form=form,
        )

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the expanded prompt of a chat request's body.

        The text of a continued message is tokenized apart, unless the engine's image processor tokenizes the whole.
        Where a tokenizer adds special tokens, the engine makes a text of all ids again and tokenizes that with them.
        Raises what :meth:`Prompter.prompt` raises.
        """
        self._check_images(images)
        text, tail = self._render(body, shows_images=bool(images))
        self._check_length(text + tail)
        if images and any(len(place.findall(text + tail)) > self._given(place, images) for place in self.places):
            message = "a text has another place for an image"
            if isinstance(self.family, PaddleOCRVL):
                raise PlaceholderError(f"{message}, and the engine would never answer")
            raise NotModelledError(f"{message}, at which the engine fails or which it expands in another way")
        if not self.family.places_images:
            return Expanded(ids=self._ids(text, tail), spans=())
        if self.codec.encode("", add_special_tokens=True):
            return self.process(text if self.form is not None else self.codec.decode(self._ids(text, tail)), images)
        if images or not tail:
            return self.expand(text + tail, images)
        return expand_ids(self._ids(text, tail), self.family.placeholder_id, ())

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """As :meth:`Prompter.completion`. Raises :class:`PromptTooLongError`, too."""
        if isinstance(prompt, str):
            self._check_length(prompt)
        return super(SglangPrompter, self).completion(prompt, add_special_tokens=add_special_tokens)

    def _check_length(self, text: str) -> None:
        """Raise :class:`PromptTooLongError` for a text that the tokenizer's code cuts; it gets the whole text here."""
        if self.codec.limits is not None and not self.codec.limits.allow(text):
            raise PromptTooLongError(f"the text is not within {self.codec.limits}")

    def process(self, text: str, images: Sequence[PromptImage]) -> Expanded:
        """Return the prompt of a text that the engine tokenizes as a whole.

        The tokenizer's special tokens are added, unless the text begins with the beginning-of-text token and has images
        that Hugging Face's processor expands. Raises what :meth:`expand` raises.
        """
        begin = self.variables.get("bos_token")
        begun = bool(images and self.places and begin and text.startswith(begin))
        if begun and isinstance(self.family, QwenVL | PaddleOCRVL):
            raise NotModelledError("whether the text begins twice depends on the engine's cache of processed images")
        return self.expand(text, images, add_special_tokens=not begun)

    def _given(self, place: re.Pattern[str], images: Sequence[PromptImage]) -> int:
        """Return the number of media that such a place in a text may be of: images, and videos where it is theirs."""
        for_videos = place.search(self.family.media_text.get("video", "")) is not None
        return sum(for_videos or image.modality == "image" for image in images)

    def expand(self, text: str, images: Sequence[PromptImage], add_special_tokens: bool = False) -> Expanded:
        """As :meth:`Prompter.expand`, with spans of the tokens that the engine overwrites.

        Raises :class:`NotModelledError` for an image without a place, which the engine drops to serve the rest.
        """
        try:
            return self.family.expand_text(self.codec, text, images, add_special_tokens=add_special_tokens)
        except PlaceholderError as error:
            raise NotModelledError(str(error)) from error

    def _ids(self, text: str, tail: str) -> "array[int]":
        """Return the ids of a text and of that which goes on behind it, each tokenized apart."""
        ids = self.codec.encode(text, add_special_tokens=False)
        more = self.codec.encode(tail, add_special_tokens=True)
        return ids + more[bool(more) and more[0] == self.codec.begin_id :]

    def _render(self, body: Mapping[str, Any], *, shows_images: bool) -> tuple[str, str]:
        """Return the rendered text, and the text of a final message that is continued after it, else empty."""
        if self.form is not None:
            reasoning(body)  # has no effect but a refusal
            return self.form.text(body), ""
        if shows_images and self.content == "string":
            raise NotModelledError("the chat template has no place for images")
        chat = shown_chat(body, self.source, self.content)
        context = {**self.variables, "documents": None, **chat.variables, "messages": chat.messages}
        context["add_generation_prompt"] = True
        try:
            return self._text(context, chat.tools), chat.tail
        except PromptTooLongError:
            raise
        except Exception as error:
            # A template is a program over the client's data, which may raise anything: the engine tries again with bare
            # functions and answers with the reason of that attempt; the first one names the cause.
            try:
                return self._text(context, chat.functions), chat.tail
            except Exception:
                raise TemplateError(f"the chat template refuses the messages: {error}") from error

    def _text(self, context: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str:
        given, written = self.form_tools(tools)
        return self.compiled[self.source].template.render({**context, **written}, tools=given)


def _places(family: Family, tokenizer: Tokenizer) -> tuple[re.Pattern[str], ...]:
    places = _PLACES.get(type(family), ())
    video = tokenizer.id_to_token(family.video_token_id) if isinstance(family, PaddleOCRVL) else None
    return places if video is None else tuple(re.compile(f"{place.pattern}|{re.escape(video)}") for place in places)


def as_sglang_loads(tokenizer: Tokenizer, name: str, config: Mapping[str, Any]) -> Tokenizer:
    """Return a tokenizer as the engine loads it. ``name``: the class that transformers chooses.

    Where that takes tokenizer.json as it is, the engine takes the declared class after all, gives it the file's first
    step of splitting where it has another kind, and begins texts as older releases of transformers did. ``config`` is
    tokenizer_config.json. Raises :class:`~mmrouter_lib.prompt.tokenizer_class.TokenizerClassError`.
    """
    declared = str(config.get("tokenizer_class"))
    if name == AS_FILE and declared in _LLAMAS:
        name = "LlamaTokenizer"
    made = as_class(tokenizer, name, config)
    before, after = tokenizer.pre_tokenizer, made.pre_tokenizer
    if before is not None and after is not None and type(before) is not type(after):
        made.pre_tokenizer = before
    begin = special_tokens(dict(config)).get("bos_token")
    if declared in _BEGIN_TEXTS and config.get("add_bos_token") in (None, True) and begin is not None:
        made.post_processor = TemplateProcessing(
            single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 $B:1", special_tokens=[(begin, made.token_to_id(begin))]
        )
    return made


def _template(templates: Templates) -> str:
    """Return the one template for all requests: the processor's, else the tokenizer's first."""
    if templates.processor is not None:
        return templates.processor
    return next(iter(templates.tokenizer.values()), "{{ raise_exception('the model has no chat template') }}")
