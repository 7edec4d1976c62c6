"""Prompts of models with Mistral's own tokenizer (tekken.json), by its library, as vLLM 0.32 builds them.

``mistral_common`` takes the place of chat template and tokenizer: it validates messages and tools, and makes the token
ids of a conversation at once. It is an optional dependency, because it takes more room than the rest of the router. The
rules around its calls are those of vLLM's front end (``tests/conformance/vllm/test_mistral.py``).
"""

import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from mmrouter_lib.families import Expanded, NotModelledError, PromptImage, TextOnly
from mmrouter_lib.families.base.mistral_images import MistralImages, SizeEncoder, with_sizes
from mmrouter_lib.model_folder import ModelFolderError, find_json
from mmrouter_lib.prompt.messages import conversation, normal_tools
from mmrouter_lib.prompt.segment_cache import MAX_TOKENS, MAX_WORD, NEW_TEXT, NewTextError, PromptTooLongError
from mmrouter_lib.prompt.templates import TemplateError

FILE: Final = "tekken.json"
PARAMS: Final = "params.json"  # takes the place of config.json
_ID_LENGTH = 9  # characters of a tool call's id, the last ones of a longer one
_WORD = re.compile(r"\S+|\s+")


class NoLibraryError(ImportError):
    """``mistral_common`` is not installed (the extra ``mistral``)."""


@dataclass(frozen=True, slots=True)
class MistralPrompter:
    """Makes prompts by ``mistral_common``. Immutable and safe to share between threads.

    ``made``: its ``MistralTokenizer``; ``version``: the number of the tokenizer's version.
    """

    first_release: ClassVar[tuple[int, ...]] = ()

    family: TextOnly | MistralImages
    made: Any
    version: int

    @classmethod
    def load(cls, folder: Path, name: str) -> Self:
        """Read ``folder/tekken.json``, and whether the model takes images. ``name``: its family's.

        Raises :class:`NoLibraryError`, :class:`ModelFolderError`.
        """
        try:
            from mistral_common.protocol.instruct.validator import ValidationMode  # noqa: PLC0415
            from mistral_common.tokens.tokenizers.mistral import MistralTokenizer  # noqa: PLC0415
        except ImportError as error:
            raise NoLibraryError(f"mistral_common is not installed: {error}") from error
        try:
            made = MistralTokenizer.from_file(str(folder / FILE), mode=ValidationMode.test)
        except Exception as error:
            # The library raises whatever its parts raise, assertions included.
            raise ModelFolderError(f"{folder / FILE}: {error!r}") from error
        family: TextOnly | MistralImages = TextOnly(name)
        instruct: Any = made.instruct_tokenizer
        encoder, instruct.image_encoder, instruct.audio_encoder = instruct.image_encoder, None, None  # they read URLs
        if takes_images(folder) and encoder is not None:
            family = MistralImages.of(name, encoder)
            instruct.image_encoder = SizeEncoder(family)
        return cls(family, made, int(made.version.value.removeprefix("v")))

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the prompt of a chat request's body.

        Raises :class:`TemplateError` for what the engine answers with 400, also with the library's own refusal,
        :class:`NotModelledError` for an image of unknown size or of a model that takes none,
        :class:`PromptTooLongError` and :class:`NewTextError`.
        """
        from mistral_common.protocol.instruct.request import ReasoningEffort  # noqa: PLC0415

        if images and isinstance(self.family, TextOnly):
            raise NotModelledError("images of this folder are not modelled", f"family:{self.family.name}")
        if body.get("chat_template_kwargs") is not None:
            raise TemplateError("chat_template_kwargs is not supported for Mistral's tokenizers")
        effort, settings = body.get("reasoning_effort"), {}
        if effort and effort not in list(ReasoningEffort):
            raise TemplateError(f"reasoning_effort {effort!r} is not supported by Mistral's tokenizers")
        if self.version >= 15:
            settings["reasoning_effort"] = effort
        # The engine reads the messages as for a template. Of the result only the calls are used, and as a text it would
        # have no place for images.
        read = conversation(body["messages"], "openai", {})
        pairs = zip(with_sizes(body["messages"], images), read, strict=True)
        messages = [_message(message, own.get("tool_calls", [])) for message, own in pairs]
        continued = bool(body.get("continue_final_message", False))
        _check_end(messages[-1], continued=continued, answered=bool(body.get("add_generation_prompt", True)))
        tools = None if body.get("tools") is None else normal_tools(body["tools"])
        ids = self.encode_chat(messages, tools, sum(image.count for image in images), continued=continued, **settings)
        if isinstance(self.family, TextOnly):
            return Expanded(ids=ids, spans=())
        return Expanded(ids=ids, spans=tuple(self.family.spans(ids, images)))

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        image_tokens: int = 0,
        *,
        continued: bool = False,
        **settings: Any,
    ) -> "array[int]":
        """Return the token ids of a conversation in OpenAI's form. ``image_tokens``: of all images in it.

        Raises :class:`TemplateError` with the library's refusal, :class:`PromptTooLongError` and :class:`NewTextError`.
        """
        from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415

        check_size([messages, tools], image_tokens)
        try:
            request = ChatCompletionRequest.from_openai(messages, tools, continued, **settings)
            return array("I", self.made.encode_chat_completion(request).tokens)
        except Exception as error:
            # The engines answer everything that the library raises with 400 and the reason.
            raise TemplateError(f"the model's tokenizer refuses the messages: {error}") from error

    def encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the token ids of a text, begun with ``<s>`` if ``add_special_tokens``; a special token in it is text.

        Raises :class:`PromptTooLongError` and :class:`NewTextError`.
        """
        check_size(text)
        return array("I", self.made.instruct_tokenizer.tokenizer.encode(text, bos=add_special_tokens, eos=False))

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """Return the prompt of a completion: of a text, or of token ids, which stay as they are.

        No text is a special token. Raises :class:`PromptTooLongError` and :class:`NewTextError`.
        """
        if not isinstance(prompt, str):
            return Expanded(ids=prompt, spans=())
        return Expanded(ids=self.encode(prompt, add_special_tokens=add_special_tokens), spans=())

    @property
    def settings(self) -> frozenset[str]:
        """The names of all fields of the library's chat request."""
        from mistral_common.protocol.instruct.request import ChatCompletionRequest  # noqa: PLC0415

        return frozenset(ChatCompletionRequest.model_fields)

    def special_id(self, text: str) -> int:
        """Return the id of a special token, that of the unknown token for any other text."""
        tokenizer = self.made.instruct_tokenizer.tokenizer
        return int(tokenizer.get_special_token(text) if tokenizer.is_special(text) else tokenizer.unk_id)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        from mistral_common.tokens.tokenizers.base import SpecialTokenPolicy  # noqa: PLC0415

        return str(self.made.decode(list(ids), special_token_policy=SpecialTokenPolicy.KEEP))


def takes_images(folder: Path) -> bool:
    """Return whether vLLM reads a model with a vision tower from params.json. Raises :class:`ModelFolderError`."""
    params = find_json(folder, PARAMS) or {}
    multimodal = params.get("multimodal") or {}
    if not isinstance(multimodal, dict):
        raise ModelFolderError(f"{folder / PARAMS}: multimodal must be an object")
    return bool(multimodal.get("vision_encoder_args") or params.get("vision_encoder"))


def _check_end(last: Mapping[str, Any], *, continued: bool, answered: bool) -> None:
    is_answer = last["role"] == "assistant"
    if continued and answered:
        raise TemplateError("continue_final_message and add_generation_prompt cannot both be true")
    if answered and is_answer:
        raise TemplateError("add_generation_prompt: the last message is the assistant's")
    if continued and not is_answer:
        raise TemplateError("continue_final_message: the last message is not the assistant's")


def _message(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return a message as the engine hands it on, with tool ``calls`` as it has read them."""
    made = dict(message)
    reasoning = made.pop("reasoning_content", None)
    if made.get("reasoning") is None and reasoning is not None:
        made["reasoning"] = reasoning
    if made["role"] == "assistant":
        made["tool_calls"] = [{**call, "id": _short(call.get("id"))} for call in calls]
    elif "tool_call_id" in made:
        made["tool_call_id"] = _short(made["tool_call_id"])
    return made


def _short(name: Any) -> Any:
    return name[-_ID_LENGTH:] if isinstance(name, str) else name


def check_size(content: Any, image_tokens: int = 0) -> None:
    """Bound the work of a prompt: the library tokenizes whole texts, and time grows faster than the length of a word.

    Raises :class:`NewTextError` for more characters and tokens of images than :data:`NEW_TEXT`,
    :class:`PromptTooLongError` for a word, or a run of blanks, of more than :data:`MAX_WORD`, and for images of more
    tokens than :data:`MAX_TOKENS`.
    """
    if image_tokens > MAX_TOKENS:
        raise PromptTooLongError(f"the images have {image_tokens} tokens")
    texts = list(_texts(content))
    if sum(map(len, texts)) + image_tokens > NEW_TEXT.get():
        raise NewTextError
    longest = max((len(word[0]) for text in texts for word in _WORD.finditer(text)), default=0)
    if longest > MAX_WORD:
        raise PromptTooLongError(f"a word of the text has {longest} characters and cannot be cut")


def _texts(content: Any) -> Iterator[str]:
    """Yield all texts in a JSON value."""
    waiting = [content]
    while waiting:
        match waiting.pop():
            case str() as text:
                yield text
            case Mapping() as entries:
                waiting += [*entries.keys(), *entries.values()]
            case list() | tuple() as entries:
                waiting += entries
