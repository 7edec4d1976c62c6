"""What vLLM 0.32 finds out about its chat template before it converts Anthropic's message requests into chats."""

from typing import Final

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mmrouter_lib.prompt.prompter import Prompter, render_arguments
from mmrouter_lib.prompt.templates import Templates

EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")  # of thinking, as Anthropic's API names them
_PROBE: Final = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]


def wants_system_first(templates: Templates) -> bool:
    """Return whether a template refuses a system message behind the first one, so that all are merged into one.

    vLLM renders a probe with a plain environment: a template that needs more than that counts as refusing, too.
    """
    for tools in (False, True):
        try:
            source = templates.choose(tools=tools)
            environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
            environment.from_string(source).render(messages=_PROBE, add_generation_prompt=False)
        except Exception:
            # A template is a program: where it fails on the probe, it would fail on such messages, too.
            return True
    return False


def effort_without_thinking(prompter: Prompter) -> str:
    """Return the effort that stands for disabled thinking: ``low`` where the template ignores or refuses ``none``."""
    without = _probe(prompter, "none")
    if without is None or any(_probe(prompter, effort) == without for effort in EFFORTS):
        return "low"
    return "none"


def _probe(prompter: Prompter, effort: str) -> str | None:
    messages = [{"role": "user", "content": "Hi"}]
    try:
        return prompter.render(messages, **render_arguments({"reasoning_effort": effort}))
    except ValueError:  # of the template, or of a prompt that is not modelled
        return None
