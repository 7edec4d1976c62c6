"""The content format of templates, as vLLM 0.32 detects it."""

import pytest

from mmrouter_lib.prompt.jinja_environment import compile_template

LOOP = "{% for m in messages %}"
END = "{% endfor %}"

PARTS = [
    LOOP + "{% for c in m.content %}{{ c }}" + END + END,
    "{% for m in messages[1:] %}{% for c in m['content']|list %}{{ c }}" + END + END,
    "{% set kept = messages %}{% for m in kept %}{% for c in m['content'][1:] %}{{ c }}" + END + END,
    "{% set kept = messages[1:] %}{% set again = kept %}{% for m in again %}{% for c in m.content %}{{ c }}"
    + END
    + END,
    LOOP + "{% set content = m.content %}{% for c in content %}{{ c }}" + END + END,
    "{% for c in content %}{{ c }}" + END,
    "{% macro show(x) %}{% for c in x %}{{ c }}" + END + "{% endmacro %}" + LOOP + "{{ show(m.content) }}" + END,
    "{% macro show(x) %}{% for c in x %}{{ c }}" + END + "{% endmacro %}" + LOOP + "{{ show(x=m.content) }}" + END,
    LOOP + "{% for c in m.content if c.type == 'text' %}{{ c }}" + END + END,
    "{% for m in messages|reverse %}{% for c in m.content|selectattr('type', 'equalto', 'image') %}{{ c }}" + END + END,
    "{% generation %}" + LOOP + "{% for c in m.content %}{{ c }}" + END + END + "{% endgeneration %}",
]
STRING = [
    "no messages at all",
    LOOP + "{{ m.content }}" + END,
    LOOP + "{% for c in m.content or [] %}{{ c }}" + END + END,
    LOOP + "{% for c in m.get('content') %}{{ c }}" + END + END,
    LOOP + "{% for c in m.text %}{{ c }}" + END + END,
    "{% for c in messages[0].content %}{{ c }}" + END,
    "{% macro show(content) %}{% for c in content %}{{ c }}"
    + END
    + "{% endmacro %}"
    + LOOP
    + "{{ show(m.text) }}"
    + END,
    # What goes into something else than a plain name is not followed, and vLLM falls back.
    "{% set n = namespace() %}{% set n.m = messages %}" + LOOP + "{% for c in m.content %}{{ c }}" + END + END,
    "{% for a, b in messages %}{% for c in a.content %}{{ c }}" + END + END,
    LOOP + "{% for a, b in m.content %}{{ a }}" + END + END,
    # Names that are set to each other must not be followed for ever.
    "{% set a = messages %}{% set messages = a %}{{ a }}",
]


@pytest.mark.parametrize("template", PARTS)
def test_a_loop_over_the_content_takes_parts(template):
    assert compile_template(template).content == "openai"


@pytest.mark.parametrize("template", STRING)
def test_everything_else_takes_a_string(template):
    assert compile_template(template).content == "string"
