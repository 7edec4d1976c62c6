"""Detect whether a chat template takes message content as a list of parts or as one string.

vLLM 0.32 decides by the template's syntax tree: parts ("openai") when a loop runs over the content of a message, a
string otherwise. The rule is as narrow as vLLM's, since a better guess would render a different prompt:

- a message is the target of a loop over ``messages``, over a name set to it, or over a slice or filter of either;
- its content is ``message.content`` or ``message['content']``, sliced or filtered or not, or a macro's parameter that
  receives it, or, outside macros, the bare name ``content``.
"""

from collections.abc import Iterator
from typing import Literal

from jinja2 import nodes

ContentFormat = Literal["openai", "string"]


class _Unfollowed(Exception):  # noqa: N818 - control flow inside this module
    """Messages or content are assigned to something other than a plain name; vLLM then chooses "string"."""


def content_format(template: nodes.Template) -> ContentFormat:
    """Return the form of message content that a parsed template takes."""
    try:
        return "openai" if _loops_over_content(template) else "string"
    except _Unfollowed:
        return "string"


def _loops_over_content(template: nodes.Template) -> bool:
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
                pairs = [
                    *zip(names, call.args, strict=False),
                    *((k.key, k.value) for k in call.kwargs if k.key in names),
                ]
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
