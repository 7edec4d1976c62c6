"""Messages -> prompt text -> token ids and spans, for one model folder."""

from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import jinja2
from jinja2.defaults import DEFAULT_NAMESPACE
from tokenizers import Tokenizer

from mmrouter_lib.families import Expanded, Family, ModelFolderError, NotModelledError, PromptImage
from mmrouter_lib.model_folder import find_json, has_byte_pairs
from mmrouter_lib.prompt.messages import conversation, normal_tools, without_developer
from mmrouter_lib.prompt.templates import Compiled, TemplateError, Templates, compile_template, find_templates
from mmrouter_lib.prompt.tokenizer import TokenizerCodec, load_tokenizer, special_tokens
from mmrouter_lib.prompt.tokenizer_class import TokenizerClassError, tokenizer_class
from mmrouter_lib.prompt.typescript_tools import sort_deeply, write_tools
from mmrouter_lib.prompt.vocabularies.byte_pairs import load_byte_pairs
from mmrouter_lib.prompt.vocabularies.tiktoken import load_tiktoken
from mmrouter_lib.tokenizer_code import ToolForm, read_tokenizer_code

_UNSET = (None, "auto")  # values in chat_template_kwargs that vLLM treats as absent

_TAG = "END OF THE MESSAGE THAT GOES ON "
"""Marks where a continued final message ends; the trailing space tells whether the template strips it."""


@dataclass(frozen=True, slots=True)
class Prompter:
    """Renders, tokenizes and expands as vLLM 0.32 does. Immutable and safe to share between threads.

    ``variables``: of the template, where a request does not set them; ``tool_form``: how tools reach it.
    """

    first_release: ClassVar[tuple[int, ...]] = ()

    family: Family
    templates: Templates
    compiled: Mapping[str, Compiled]
    tokenizer: Tokenizer
    codec: TokenizerCodec
    variables: Mapping[str, Any]
    tool_form: ToolForm = "given"

    @classmethod
    def load(
        cls, model_dir: Path, *, chat_template: str | None = None, family: Family, tokenizer: Tokenizer | None = None
    ) -> Self:
        """Read a model folder; ``chat_template`` (a text) and ``tokenizer`` replace what it has.

        Raises :class:`ModelFolderError`.
        """
        config = find_json(model_dir, "tokenizer_config.json") or {}
        templates = find_templates(model_dir, chat_template, config, family.chat_template)
        try:
            compiled = {source: compile_template(source) for source in templates.texts()}
        except jinja2.TemplateError as error:
            raise ModelFolderError(f"{model_dir}: the chat template does not compile: {error}") from error
        code = read_tokenizer_code(model_dir, config)
        if tokenizer is None and code is not None:
            tokenizer = load_tiktoken(model_dir, config, code)
        elif tokenizer is None and has_byte_pairs(model_dir):
            try:
                name = tokenizer_class(family.name, config.get("tokenizer_class"))
                tokenizer, config = load_byte_pairs(model_dir, config, name)
            except TokenizerClassError as error:
                raise ModelFolderError(f"{model_dir}: no tokenizer.json, and the class is {error}") from error
        elif tokenizer is None:
            tokenizer = load_tokenizer(model_dir, config)
        codec = TokenizerCodec.of(tokenizer, config, None if code is None else code.limits)
        try:
            family.check(codec)
        except ModelFolderError as error:
            raise ModelFolderError(f"{model_dir}: {error}") from error
        variables = {**special_tokens(config), **(code.variables if code is not None else {})}
        form: ToolForm = "given" if code is None else code.tools
        return cls(family, templates, compiled, tokenizer, codec, variables, form)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text of OpenAI chat messages. The arguments are the fields of a chat request.

        As in vLLM, ``tools`` within ``chat_template_kwargs`` replace the request's, and ``documents`` are used when the
        request has none. Raises :class:`TemplateError`, also with the template's own refusal,
        :class:`NotModelledError`, and :class:`PlaceholderError` as :func:`~mmrouter_lib.prompt.messages.conversation`
        does.
        """
        if continue_final_message and add_generation_prompt:
            raise TemplateError("continue_final_message and add_generation_prompt cannot both be true")
        if tools is not None:
            tools = normal_tools(tools)
        variables = {k: v for k, v in (chat_template_kwargs or {}).items() if v not in _UNSET}
        if refused := sorted(variables.keys() & REPLACING):
            raise TemplateError(f"chat_template_kwargs.{refused[0]} is not accepted")
        for name in ("tokenize", "add_generation_prompt", "continue_final_message"):
            variables.pop(name, None)
        tools = variables.pop("tools", tools)
        fallback = variables.pop("documents", None)
        documents = fallback if documents is None else documents
        for name, objects in (("tools", tools), ("documents", documents)):
            is_list = isinstance(objects, list | tuple) and all(isinstance(entry, Mapping) for entry in objects)
            if objects is not None and not is_list:
                raise TemplateError(f"{name} must be a list of objects")
        tools, written = self.form_tools(tools)
        compiled = self.compiled[self.templates.choose(tools=tools is not None)]
        chat = conversation(messages, compiled.content, self.family.media_text)
        if not compiled.handles_developer:
            chat = without_developer(chat)
        final = ""
        if continue_final_message:
            if not compiled.mentions_content:
                raise TemplateError("continue_final_message: the chat template shows no message content")
            chat, final = _tag_final(chat)
        context = {
            **self.variables,
            **variables,
            **written,
            "messages": chat,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = compiled.template.render(context)
        except Exception as error:
            # A template is a program over the client's data: vLLM answers every error in it with 400 and the reason.
            raise TemplateError(f"the chat template refuses the messages: {error}") from error
        return _cut_final(text, final) if continue_final_message else text

    def form_tools(
        self, tools: Sequence[Mapping[str, Any]] | None
    ) -> tuple[Sequence[Mapping[str, Any]] | None, dict[str, str]]:
        """Return tools as the tokenizer's code gives them to the template, and variables that it makes of them.

        Raises :class:`~mmrouter_lib.prompt.segment_cache.PromptTooLongError` for a text of them that is too long.
        """
        if not tools or self.tool_form == "given":
            return tools, {}
        ordered: list[dict[str, Any]] = sort_deeply(list(tools))
        text = write_tools(ordered) if self.tool_form == "typescript" else None
        return ordered, {} if text is None else {"tools_ts_str": text}

    def prompt(self, body: Mapping[str, Any], images: Sequence[PromptImage]) -> Expanded:
        """Return the expanded prompt of a chat request's body. Raises what :meth:`render` and :meth:`expand` raise,
        and :class:`NotModelledError`.
        """
        self._check_images(images)
        text = self.render(body["messages"], **render_arguments(body))
        return self.expand(text, images, add_special_tokens=bool(body.get("add_special_tokens", False)))

    def _check_images(self, images: Sequence[PromptImage]) -> None:
        if images and not self.family.places_images:
            raise NotModelledError("the place of images is not modelled", f"family:{self.family.name}")

    def completion(self, prompt: "str | array[int]", *, add_special_tokens: bool = True) -> Expanded:
        """Return the prompt of a completion: of a text, or of token ids, which stay as they are.

        Engines begin a text as the tokenizer does by default, and place no images. Raises what :meth:`expand` raises.
        """
        if isinstance(prompt, str):
            return self.expand(prompt, (), add_special_tokens)
        return Expanded(ids=prompt, spans=())

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def expand(self, text: str, images: Sequence[PromptImage], add_special_tokens: bool = False) -> Expanded:
        """Return the token ids of a prompt text with every image expanded, and the images' spans.

        vLLM's chat adds no special tokens by default. Raises :class:`PlaceholderError` when the text has no place for
        an image, :class:`TemplateError` for text that is not Unicode.
        """
        return self.family.expand(self.codec, text, images, add_special_tokens=add_special_tokens)


def _tag_final(chat: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Return the conversation with the last text of the final message tagged, and that text."""
    last = deepcopy(chat[-1])
    parts = last["content"]
    if isinstance(parts, str):
        last["content"] = parts + _TAG
        return [*chat[:-1], last], parts
    for part in reversed(parts):
        if "text" in part:
            final = str(part["text"])
            part["text"] = final + _TAG
            return [*chat[:-1], last], final
    raise TemplateError("continue_final_message: the final message has no text to continue")


def _cut_final(text: str, final: str) -> str:
    """Return the rendered text up to where the final message ends."""
    at = text.rfind(_TAG.strip())
    if at < 0 or final.strip() not in text:
        raise TemplateError("continue_final_message: the chat template does not show the final message as it is")
    return text[:at] if text.startswith(_TAG, at) else text[:at].rstrip()


REPLACING = ("chat_template", "conversation", "messages", "return_assistant_tokens_mask")
"""Names in ``chat_template_kwargs`` that the engine answers with 400: they would replace parts of the request."""


def render_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of ``Prompter.render(messages, ...)`` for the fields of a chat request.

    A name in ``chat_template_kwargs`` that Jinja itself defines (``range``, ``namespace``) is dropped.
    ``reasoning_effort`` reaches the template as a variable, and switches ``enable_thinking`` where the client does not.
    Raises :class:`TemplateError` for ``chat_template_kwargs`` that are not an object.
    """
    given = body.get("chat_template_kwargs")
    if not (given is None or isinstance(given, Mapping)):
        raise TemplateError("chat_template_kwargs must be an object")
    kwargs = {name: value for name, value in (given or {}).items() if name not in DEFAULT_NAMESPACE}
    effort = body.get("reasoning_effort")
    if effort is not None:
        kwargs.setdefault("enable_thinking", effort != "none")
        kwargs["reasoning_effort"] = effort
    return {
        "tools": body.get("tools"),
        "documents": body.get("documents"),
        "add_generation_prompt": bool(body.get("add_generation_prompt", True)),
        "continue_final_message": bool(body.get("continue_final_message", False)),
        "chat_template_kwargs": kwargs,
    }
