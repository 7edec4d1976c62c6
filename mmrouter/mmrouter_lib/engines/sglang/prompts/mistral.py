"""Prompts of models with Mistral's own tokenizer (tekken.json) as SGLang 0.5.23 builds them, by ``mistral_common``.

The engine gives the library the messages that a template would get. Beside images it writes the library's ids as a text
and tokenizes that anew, so that control tokens such as ``[INST]`` become letters; only the tokens of images stay what
they are. Compared with the engine's own code by ``tests/conformance/sglang/test_mistral.py``.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, Self

from mmrouter_lib.engines.sglang.families.pixtral import SglangPixtral
from mmrouter_lib.engines.sglang.prompts.chats import ShownChat, content_format, shown_chat
from mmrouter_lib.families import Expanded, NotModelledError, PlaceholderError, PromptImage, TextOnly
from mmrouter_lib.families.pixtral import BREAK, END
from mmrouter_lib.model_folder import ModelFolderError
from mmrouter_lib.prompt.mistral import FILE, MistralPrompter, check_size
from mmrouter_lib.prompt.templates import ContentFormat, TemplateError

MODEL_TYPES: Final = frozenset({"ministral", "ministral3", "mistral", "mistral3", "mixtral", "pixtral", "voxtral"})
"""``model_type``s for which transformers 5.19 takes tekken.json before tokenizer.json."""
_IMAGE: Final = "[IMG]"
_OF_IMAGES = re.compile(rf"({'|'.join(map(re.escape, (_IMAGE, BREAK, END)))})")
_SETTINGS = frozenset({"padding", "truncation", "max_length", "return_tensors", "seed"})
"""Variables of a template that change the prompt, or end the request, beside the fields of the library's requests."""


@dataclass(frozen=True, slots=True)
class SglangMistralPrompter:
    """Makes prompts by ``mistral_common`` as SGLang does. Immutable and safe to share between threads.

    ``source``: the text of the chat template, which is not rendered but decides how contents are passed.
    ``image_ids``: text -> id of the tokens that images are made of.
    """

    first_release: ClassVar[tuple[int, ...]] = (0, 5, 21)  # earlier ones tokenize every prompt as a text

    family: TextOnly | SglangPixtral
    library: MistralPrompter
    source: str
    content: ContentFormat
    image_ids: Mapping[str, int]

    @classmethod
    def load(cls, folder: Path, family: TextOnly | SglangPixtral, source: str | None) -> Self:
        """Read ``folder/tekken.json``. ``source``: ``None`` where the engine finds no template.

        Raises :class:`~mmrouter_lib.prompt.mistral.NoLibraryError`, :class:`ModelFolderError`.
        """
        library = MistralPrompter.load(folder, family.name)
        image_ids = {text: library.special_id(text) for text in (_IMAGE, BREAK, END)}
        if isinstance(family, SglangPixtral) and image_ids[_IMAGE] != family.placeholder_id:
            raise ModelFolderError(
                f"{folder / FILE} has {_IMAGE} as {image_ids[_IMAGE]}, config.json as {family.placeholder_id}"
            )
        content = "openai" if source is None else content_format(source)
        return cls(family, library, source or "", content, image_ids)

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the prompt of a chat request's body.

        Raises :class:`TemplateError` for what the engine answers with 400, :class:`NotModelledError`,
        :class:`~mmrouter_lib.prompt.segment_cache.PromptTooLongError` and
        :class:`~mmrouter_lib.prompt.segment_cache.NewTextError`.
        """
        family = self.family
        if images and (isinstance(family, TextOnly) or self.content == "string"):
            raise NotModelledError("images of this folder are not modelled", f"family:{family.name}")
        chat = shown_chat(body, self.source, self.content)
        ids = self._ids(chat, sum(image.count for image in images)) + self._continued(chat.tail)
        if not images or isinstance(family, TextOnly):
            return Expanded(ids=ids, spans=())
        text = self.decode(ids)
        if text.count(_IMAGE) > len(images):
            raise NotModelledError("a text has another place for an image, at which the engine fails")
        try:
            ids = self._encode(text, add_special_tokens=False)
            return family.expand_ids(ids, images, self.image_ids[BREAK], self.image_ids[END])
        except PlaceholderError as error:
            raise NotModelledError(str(error)) from error

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """Return the prompt of a completion: of a text, or of token ids, which stay as they are.

        Raises :class:`~mmrouter_lib.prompt.segment_cache.PromptTooLongError` and
        :class:`~mmrouter_lib.prompt.segment_cache.NewTextError`.
        """
        ids = self._encode(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        return Expanded(ids=ids, spans=())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.library.decode(ids)

    def _ids(self, chat: ShownChat, image_tokens: int) -> "array[int]":
        effort = chat.variables.pop("reasoning_effort", None)
        if settings := chat.variables.keys() & (_SETTINGS | self.library.settings):
            raise NotModelledError(f"chat_template_kwargs.{min(settings)} is a setting of the tokenizer's library")
        messages = [message for message in map(_placed, chat.messages) if not _is_empty(message)]
        try:
            return self.library.encode_chat(messages, chat.tools, image_tokens, reasoning_effort=effort)
        except TemplateError as first:
            # The engine tries again with bare functions and answers with that refusal; the first one names the cause.
            with suppress(TemplateError):
                return self.library.encode_chat(messages, chat.functions, image_tokens, reasoning_effort=effort)
            raise first

    def _continued(self, tail: str) -> "array[int]":
        """Return the ids of the text that goes on behind a prompt: it is tokenized apart."""
        return self._encode(tail, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> "array[int]":
        """Return the ids of a text, in which only the tokens of images are special tokens."""
        check_size(text)
        first, *others = _OF_IMAGES.split(text)
        ids = self.library.encode(first, add_special_tokens=add_special_tokens)
        for token, piece in zip(others[::2], others[1::2], strict=True):
            ids.append(self.image_ids[token])
            ids += self.library.encode(piece, add_special_tokens=False)
        return ids


def _placed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message with its images as texts, one text with the others."""
    parts = message["content"]
    if isinstance(parts, str) or all(part["type"] == "text" for part in parts):
        return dict(message)
    return {**message, "content": "".join(part["text"] if part["type"] == "text" else _IMAGE for part in parts)}


def _is_empty(message: Mapping[str, Any]) -> bool:
    """Whether a message is the assistant's and says nothing: the engine leaves it out."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return message["role"] == "assistant" and not message.get("tool_calls") and not "".join(texts).strip()
