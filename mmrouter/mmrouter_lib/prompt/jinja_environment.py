"""Compile chat templates with the Jinja environment of transformers 5.19."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrouter_lib.prompt.content_format import ContentFormat, content_format


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled template, and properties of its source that decide how messages are passed to it."""

    template: jinja2.Template
    content: ContentFormat
    handles_developer: bool
    """Whether it names the role ``developer``; otherwise vLLM turns such messages into system messages."""
    mentions_content: bool
    """Whether it names ``content``, which continuing a final message needs."""


def compile_template(source: str) -> Compiled:
    """Compile a chat template. Raises ``jinja2.TemplateSyntaxError``."""
    environment = _environment()
    return Compiled(
        template=environment.from_string(source),
        content=content_format(environment.parse(source)),
        handles_developer='"developer"' in source or "'developer'" in source,
        mentions_content="content" in source,
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


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


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)  # noqa: DTZ005 - the engine shows its local time
