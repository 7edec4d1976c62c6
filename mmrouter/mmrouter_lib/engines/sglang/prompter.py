"""Prompts as SGLang 0.5.23 builds them, by its own rules (docs/engine-facts/sglang.md#prompts).

Compared with the engine's own code by ``tests/conformance/sglang/test_rendering.py``.
"""

import re
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import orjson
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from mmrouter_lib.engines.sglang.conversation_form import INTERNVL, PADDLEOCR, ConversationForm
from mmrouter_lib.engines.sglang.families.internvl import SglangInternVL
from mmrouter_lib.engines.sglang.families.pixtral import SglangPixtral
from mmrouter_lib.engines.sglang.tool_schemas import shown_tools
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
from mmrouter_lib.prompt.templates import (
    Compiled,
    ContentFormat,
    TemplateError,
    Templates,
    compile_template,
    loops_over_content,
)
from mmrouter_lib.prompt.tokenizer import load_tokenizer, special_tokens
from mmrouter_lib.prompt.tokenizer_class import AS_FILE, as_class
from mmrouter_lib.tokenizer_code import read_tokenizer_code

_LLAMAS = frozenset({"LlamaTokenizer", "LlamaTokenizerFast"})
_BEGIN_TEXTS = _LLAMAS | {"CodeLlamaTokenizer", "CodeLlamaTokenizerFast", "CohereTokenizerFast"}
_BEGIN_TEXTS |= {"GemmaTokenizer", "GemmaTokenizerFast"}
_SHOWS_MEDIA = ("image", "audio", "video", "vision")
"""A template with one of these words gets contents as parts, any other one texts, and then images are dropped."""
_MESSAGE_NAMES = ("message", "msg", "m")
_ARGUMENTS = ("conversation", "tools", "add_generation_prompt", "tokenize", "return_dict")
"""Names that the engine passes itself: a second value in ``chat_template_kwargs`` is an error."""
_LOW_EFFORT = ("low_effort", "truncate_history_thinking")  # a template with both gets the first for a low effort
_EFFORTS = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_TRUE = frozenset({"1", "true", "yes", "y", "on"})
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
_FIELDS = ("role", "content", "tool_call_id", "name", "reasoning_content", "tool_calls")
"""Fields of a message that reach the template, in their order; of a user's message the first two alone."""


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
        in_parts = any(word in source for word in _SHOWS_MEDIA) or loops_over_content(source, _MESSAGE_NAMES)
        return replace(
            loaded,
            compiled=compiled,
            source=source,
            content="openai" if in_parts else "string",
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
        if images and any(len(place.findall(text + tail)) > len(images) for place in self.places):
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
            _reasoning(body)  # has no effect but a refusal
            return self.form.text(body), ""
        if shows_images and self.content == "string":
            raise NotModelledError("the chat template has no place for images")
        given = body.get("messages")
        if isinstance(given, str) or not isinstance(given, Sequence) or not given:
            raise TemplateError("messages must be a list of at least one message")
        if "tool_call_id" in self.source and _has_reordered_media(given):
            raise NotModelledError("results of tools with images are not in the order of the calls")
        chat = [_message(message, f"messages[{at}]", self.content) for at, message in enumerate(given)]
        tail = ""
        last = chat[-1]["content"] if chat[-1]["role"] == "assistant" else None
        if isinstance(last, str):
            if body.get("continue_final_message"):
                chat, tail = chat[:-1], last
            else:
                chat[-1] = {"role": "user", "content": last}
        variables = template_variables(body)
        context = {**self.variables, "documents": None, **variables, "messages": chat, "add_generation_prompt": True}
        if variables.get("reasoning_effort") == "low" and all(name in self.source for name in _LOW_EFFORT):
            raise NotModelledError("the engine adds a variable of the template")
        choice = body.get("tool_choice")
        tools = shown_tools(body.get("tools"), choice)
        try:
            return self._text(context, tools), tail
        except PromptTooLongError:
            raise
        except Exception as error:
            # A template is a program over the client's data, which may raise anything: the engine tries again with bare
            # functions, then answers an error with 400 and the reason of the first attempt.
            bare = None if tools is None else [tool["function"] for tool in tools]
            try:
                return self._text(context, bare), tail
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


def template_variables(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the template's variables of a chat request: ``chat_template_kwargs`` and what its reasoning fields set.

    Raises :class:`TemplateError` for values that the engine refuses.
    """
    given = body.get("chat_template_kwargs")
    if not (given is None or isinstance(given, Mapping)):
        raise TemplateError("chat_template_kwargs must be an object")
    kwargs = dict(given or {})
    effort, thinking = _reasoning(body)
    if thinking is not None:
        kwargs = {"thinking": thinking, "enable_thinking": thinking} | kwargs
    own = kwargs.pop("reasoning_effort", None)
    effort = effort if own is None else own
    if refused := [name for name in _ARGUMENTS if name in kwargs]:
        raise TemplateError(f"chat_template_kwargs.{refused[0]} is not accepted")
    if kwargs.pop("continue_final_message", None):
        raise TemplateError("chat_template_kwargs.continue_final_message is not accepted")
    return kwargs if effort is None else {"reasoning_effort": effort, **kwargs}


def _reasoning(body: Mapping[str, Any]) -> tuple[str | float | None, bool | None]:
    """Return the effort, and whether to think, that a request's reasoning fields set. Raises :class:`TemplateError`."""
    effort, reasoning, thinking = body.get("reasoning_effort"), body.get("reasoning"), None
    if isinstance(reasoning, Mapping):
        named = reasoning.get("effort")
        named = reasoning.get("reasoning_effort") if named is None else named
        effort = effort if named is None else named
        enabled = reasoning.get("enabled")
        enabled = reasoning.get("enable", False) if enabled is None else enabled
        thinking = True if (enabled.strip().lower() in _TRUE if isinstance(enabled, str) else enabled) else None
    if effort is None:
        return None, thinking
    effort = _effort(effort)
    return effort, effort != "none"


def _effort(value: Any) -> str | float:
    if isinstance(value, str) and value in _EFFORTS:
        return value
    try:
        if not isinstance(value, bool) and 0 <= (number := float(value)) <= 0.99:
            return number
    except (TypeError, ValueError):
        pass
    raise TemplateError(f"reasoning_effort {value!r} is neither a known word nor a number from 0 to 0.99")


def _template(templates: Templates) -> str:
    """Return the one template for all requests: the processor's, else the tokenizer's first."""
    if templates.processor is not None:
        return templates.processor
    return next(iter(templates.tokenizer.values()), "{{ raise_exception('the model has no chat template') }}")


def _message(message: Mapping[str, Any], where: str, content: ContentFormat) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise TemplateError(f"{where} must be an object with a role")
    made = {
        name: message[name] for name in (_FIELDS[:2] if role == "user" else _FIELDS) if message.get(name) is not None
    }
    if calls := made.get("tool_calls"):
        parsed = role == "assistant"
        made["tool_calls"] = [_call(call, f"{where}.tool_calls[{at}]", parsed=parsed) for at, call in enumerate(calls)]
    parts = made.get("content")
    if parts is None:
        return {"role": role, "content": ""} | made
    if isinstance(parts, str):
        return made
    del made["content"]  # it comes last then
    shown = [_part(part, f"{where}.content[{at}]") for at, part in enumerate(parts)]
    texts = [part["text"] for part in shown if part["type"] == "text"]
    if content == "string" or (role == "tool" and len(texts) == len(parts)):
        return made | {"content": " ".join(texts)}
    return made | {"content": shown}


def _part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    match part.get("type"):
        case "text":
            return {"type": "text", "text": part["text"]}
        case "image_url" | "video_url" | "audio_url" as kind:
            return {"type": kind.removesuffix("_url")}
        case kind:
            raise TemplateError(f"{where}.type is {kind!r}, which is not supported")


def _call(call: object, where: str, *, parsed: bool) -> dict[str, Any]:
    """Return a tool call with all fields of the engine's model. Raises for ``arguments`` that are no JSON object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise TemplateError(f"{where} must be an object with a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and parsed:
        try:
            arguments = orjson.loads(arguments)
        except orjson.JSONDecodeError as error:
            raise TemplateError(f"{where}.function.arguments must be valid JSON") from error
        if not isinstance(arguments, dict):
            raise TemplateError(f"{where}.function.arguments must be a JSON object")
    named = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "index": call.get("index"), "type": "function", "function": named}


def _has_reordered_media(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether results of tools that hold media stand in another order than the calls, which the engine then restores.

    A wrong yes is safe, because the request is then served without a prediction.
    """
    places: dict[Any, int] = {}  # id of a call of the last message that is no result -> its first place
    reached, in_order = 0, True
    for message in messages:
        if message.get("role") != "tool":
            calls = message.get("tool_calls") or ()
            ids = [call.get("id") for call in calls]
            places = {ids[at]: at for at in reversed(range(len(ids))) if not isinstance(ids[at], list | dict)}
            reached, in_order = 0, True
            continue
        place = places.get(message.get("tool_call_id"), reached)
        in_order &= place >= reached
        reached = max(reached, place)
        if isinstance(message.get("content"), list) and not in_order:
            return True
    return False
