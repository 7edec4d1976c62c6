"""Take the arguments of :meth:`Prompter.render` from a chat request's body, as vLLM 0.32 does."""

from collections.abc import Mapping
from typing import Any

from jinja2.defaults import DEFAULT_NAMESPACE

from mmrouter_lib.prompt.messages import TemplateError

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
