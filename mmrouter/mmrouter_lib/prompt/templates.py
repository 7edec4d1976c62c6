"""Find the chat template that an engine uses for a model folder, compile it, and detect what it takes as content.

vLLM 0.32 takes the processor's template before the tokenizer's, and only the tokenizer's when the request has tools;
each has its own order of files. Templates are compiled with the Jinja environment of transformers 5.19.

Message content is a list of parts ("openai") when a loop of the template runs over the content of a message, a string
otherwise. The rule is as narrow as vLLM's, since a better guess would render a different prompt:

- a message is the target of a loop over ``messages``, over a name set to it, or over a slice or filter of either;
- its content is ``message.content`` or ``message['content']``, sliced or filtered or not, or a macro's parameter that
  receives it, or, outside macros, the bare name ``content``.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrouter_lib.model_folder import ModelFolderError, find_json, find_text


class TemplateError(ValueError):
    """The chat template cannot render the messages, or refuses them: the client's error, an answer of 400."""


ContentFormat = Literal["openai", "string"]


class _Unfollowed(Exception):  # noqa: N818 - control flow inside this module
    """Messages or content are assigned to something other than a plain name; vLLM then chooses "string"."""


def _loops_over_content(template: nodes.Template) -> bool:
    """Whether a loop runs over the content of a message. Raises :class:`_Unfollowed`."""
    messages = set(_message_names(template))
    inside, parameters = _macro_loops(template, messages)
    for loop in template.find_all(nodes.For):
        over = loop.iter
        if (
            any(_reads(over, name, "content") for name in messages)
            or (isinstance(over, nodes.Name) and over.name in parameters.get(id(loop), ()))
            or (isinstance(over, nodes.Name) and over.name == "content" and id(loop) not in inside)
        ):
            _target_name(loop.target)
            return True
    return False


def _message_names(template: nodes.Template) -> Iterator[str]:
    """Yield the targets of all loops over the messages."""
    lists, waiting = {"messages"}, ["messages"]
    while waiting:
        name = waiting.pop(0)
        for assignment in template.find_all(nodes.Assign):
            if _reads(assignment.node, name):
                alias = _target_name(assignment.target)
                if alias not in lists:
                    lists.add(alias)
                    waiting.append(alias)
    for loop in template.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            yield _target_name(loop.target)


def _macro_loops(template: nodes.Template, messages: set[str]) -> tuple[set[int], dict[int, set[str]]]:
    """Return the loops inside macros, and for each those parameters of its macro that are called with a content."""
    inside: set[int] = set()
    parameters: dict[int, set[str]] = {}
    calls = [call for call in template.find_all(nodes.Call) if isinstance(call.node, nodes.Name)]
    for macro in template.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        given: set[str] = set()
        for call in calls:
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                named = ((k.key, k.value) for k in call.kwargs if k.key in names)
                pairs = [*zip(names, call.args, strict=False), *named]
                given |= {name for name, value in pairs if any(_reads(value, m, "content") for m in messages)}
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if given:
                parameters[id(loop)] = given
    return inside, parameters


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is the variable (or its attribute ``key``), possibly filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        match node:
            case nodes.Getitem(arg=nodes.Const(value=value)) if value == key:
                node = node.node
            case nodes.Getattr(attr=attribute) if attribute == key:
                node = node.node
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _target_name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _Unfollowed
    return target.name


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled template, and properties of its source that decide how messages are passed to it."""

    template: jinja2.Template
    content: ContentFormat
    handles_developer: bool
    """Whether it names the role ``developer``; otherwise vLLM turns such messages into system messages."""
    mentions_content: bool  # whether it names content, which continuing a final message needs


def loops_over_content(source: str, names: Sequence[str]) -> bool:
    """Whether a loop of a template runs over the content of a message of one of these names, wherever it is from."""
    loops = _environment().parse(source).find_all(nodes.For)
    return any(_reads(loop.iter, name, "content") for loop in loops for name in names)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])


def compile_template(source: str) -> Compiled:
    """Compile a chat template. Raises ``jinja2.TemplateSyntaxError``."""
    environment = _environment()
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)  # noqa: DTZ005 - as the engine
    try:
        content: ContentFormat = "openai" if _loops_over_content(environment.parse(source)) else "string"
    except _Unfollowed:
        content = "string"
    return Compiled(
        template=environment.from_string(source),
        content=content,
        handles_developer='"developer"' in source or "'developer'" in source,
        mentions_content="content" in source,
    )


class _Generation(Extension):
    """``{% generation %}`` ... ``{% endgeneration %}`` marks the model's text; in a prompt it renders its body."""

    tags = {"generation"}  # noqa: RUF012 - the attribute's type is jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML and sorts keys, and either would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


NAMED_TEMPLATES = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Templates:
    """The template texts of a folder. ``tokenizer`` maps names to texts; a single template is named ``default``."""

    processor: str | None
    tokenizer: dict[str, str]

    def choose(self, *, tools: bool) -> str:
        """Return the template for a request with or without tools. Raises :class:`TemplateError` without one."""
        if self.processor is not None and not tools:
            return self.processor
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.tokenizer:
                return self.tokenizer[name]
        raise TemplateError(f"the model has no chat template for a request {'with' if tools else 'without'} tools")

    def texts(self) -> set[str]:
        """Return every template that :meth:`choose` can return."""
        texts = {text for name, text in self.tokenizer.items() if name in ("default", "tool_use")}
        return texts if self.processor is None else texts | {self.processor}


def find_templates(
    folder: Path, explicit: str | None, tokenizer_config: dict[str, Any], fallback: str | None = None
) -> Templates:
    """Return a folder's templates, or ``explicit``: a text or the name of one. ``fallback`` takes the place of a
    tokenizer's template. Raises :class:`ModelFolderError`.
    """
    tokenizer = _tokenizer_templates(folder, tokenizer_config)
    if explicit is not None:
        return Templates(processor=None, tokenizer={"default": tokenizer.get(explicit, explicit)})
    if (folder / NAMED_TEMPLATES).is_dir():
        raise ModelFolderError(f"{folder / NAMED_TEMPLATES}: named template files need spec.engine.chatTemplate")
    if not tokenizer and fallback is not None:
        tokenizer = {"default": fallback}
    return Templates(processor=_processor_template(folder), tokenizer=tokenizer)


def _processor_template(folder: Path) -> str | None:
    """processor_config.json, then the older chat_template.json, then chat_template.jinja."""
    inside = (find_json(folder, "processor_config.json") or {}).get("chat_template")
    if inside is None:
        legacy = find_json(folder, "chat_template.json")
        if legacy is None:
            return find_text(folder, "chat_template.jinja")
        inside = legacy.get("chat_template")
    if not isinstance(inside, str):
        raise ModelFolderError(f"{folder}: the processor's chat_template must be a text, not {type(inside).__name__}")
    return inside


def _tokenizer_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja, then tokenizer_config.json, where it is a text or a list of named texts."""
    alone = find_text(folder, "chat_template.jinja")
    if alone is not None:
        return {"default": alone}
    value = config.get("chat_template")
    match value:
        case None:
            return {}
        case str():
            return {"default": value}
        case dict():
            named = value
        case list() if all(isinstance(entry, dict) for entry in value):
            named = {entry.get("name"): entry.get("template") for entry in value}
        case _:
            named = {"": None}
    if not all(isinstance(part, str) for pair in named.items() for part in pair):
        raise ModelFolderError(f"{folder / 'tokenizer_config.json'}: chat_template holds no named texts")
    return named
