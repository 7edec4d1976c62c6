"""Texts of forms: each matches its form, by a matcher of another make."""

import contextlib
import json
import math
import re
from typing import Any, NamedTuple, Self

import pytest
from answer_forms import SCHEMA
from hypothesis import given
from hypothesis import strategies as st
from lark import Lark

from mmrouter_sim.constraints.constrained_text import formed_text
from mmrouter_sim.constraints.grammars import grammar, regex
from mmrouter_sim.constraints.shortest import FormError, shortest

ATOMS = [
    "a",
    "é",
    ".",
    r"\.",
    r"\d",
    r"\W",
    r"\S",
    "[a-c]",
    "[^x0]",
    r"[^\w]",
    r"[\]\-^]",
    r"[\s-]",
    "-",
    "]",
    r"\u0042",
]
REPEATS = ["", "", "*", "+", "?", "{2}", "{1,3}", "{2,}", "+?"]
EXPRESSIONS = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.builds("({}){}".format, inner, st.sampled_from(REPEATS)),
        st.lists(inner, max_size=4).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"(?:{'|'.join(parts)})"),
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("atom", ATOMS)
def test_a_character_is_one_of_those_that_are_named(atom: str) -> None:
    assert re.fullmatch(atom, shortest(regex(atom)))


@given(EXPRESSIONS)
def test_a_text_matches_its_regular_expression(source: str) -> None:
    assert re.fullmatch(source, shortest(regex(source)))
    assert shortest(regex(f"^{source}$")) == shortest(regex(source))


RULES = ("one", "two", "three")
MOST_WAYS = 100


class Part(NamedTuple):
    """A part of a rule. ``ways``: into how many alternatives lark expands it, which nested repeats make billions."""

    text: str
    ways: int

    @classmethod
    def repeated(cls, part: "Part", how: str) -> Self:
        ways = {"{2}": part.ways**2, "{1,3}": part.ways + part.ways**2 + part.ways**3}.get(how, part.ways + 1)
        return cls(f"({part.text}){how}", ways)

    @classmethod
    def joined(cls, parts: list["Part"]) -> Self:
        return cls(" ".join(part.text for part in parts), math.prod(part.ways for part in parts))

    @classmethod
    def chosen(cls, parts: list["Part"]) -> Self:
        return cls(f"({' | '.join(part.text for part in parts)})", sum(part.ways for part in parts))


PARTS = st.recursive(
    st.sampled_from([Part(text, 1) for text in ('"a"', '"bc"', *RULES)]),
    lambda inner: st.one_of(
        st.builds(Part.repeated, inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}"])),
        st.lists(inner, min_size=1, max_size=3).map(Part.joined),
        st.lists(inner, min_size=1, max_size=3).map(Part.chosen),
    ).filter(lambda part: part.ways <= MOST_WAYS),
    max_leaves=8,
)


@given(st.lists(PARTS.map(lambda part: part.text), min_size=4, max_size=4))
def test_a_text_matches_its_grammar(bodies: list[str]) -> None:
    """Each rule may contain the others and itself, and has a text because of its last alternative."""
    rules = dict(zip(RULES, bodies[1:], strict=True))
    ebnf = "\n".join([f"root ::= {bodies[0]}", *(f'{name} ::= {body} | "d"' for name, body in rules.items())])
    lark = ebnf.replace("root ::=", "start:").replace(" ::=", ":")
    text = shortest(grammar(ebnf, lark=True))
    assert shortest(grammar(lark, lark=True)) == text
    counted = re.sub(r"\{(\d)(?:,(\d))?\}", lambda found: f"~{found[1]}..{found[2] or found[1]}", lark)
    Lark(counted, parser="earley", lexer="dynamic").parse(text)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('root ::= "a" root | "b" # the end', "b"),
        ("    root ::= x-1{3}\n    x-1 ::= [^a-z\\n]\n    ", "000"),
        ('root ::= ("a" |\n"")\n "\\x41\\u0042\\n"', "AB\n"),
        ('?start: [SIGN] DIGITS "."~2 -> number\nSIGN: "+" | "-"\nDIGITS: /[1-9]/ // one\n%ignore " "', "1.."),
        ('%import common (INT, WORD)\n%import common.WS -> SPACE\nstart: INT SPACE WORD "z".."z"', "0 xz"),
    ],
)
def test_a_grammar_is_read_as_its_engine_reads_it(source: str, text: str) -> None:
    assert shortest(grammar(source, lark=True)) == text


@given(st.text(max_size=40) | st.text(alphabet='a\\[](){}*+?|^-.,1:="/~%<>\n ', max_size=40))
def test_any_text_is_a_form_or_is_refused(source: str) -> None:
    for read in (regex, lambda text: grammar(text, lark=True), lambda text: grammar(f"root ::= {text}", lark=False)):
        with contextlib.suppress(FormError):
            shortest(read(source))


EMPTY = "a?" * 50
DOUBLES = "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(300))
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "nested repeats": ({"regex": "(" * 900 + "a" + "){9999}" * 900}, "longer"),
    "repeats beyond any number": ({"regex": f"a{{{'9' * 6_000}}}"}, "cannot read"),
    "a rule that doubles": ({"grammar": f'root ::= r0\n{DOUBLES}r300 ::= "a"'}, "longer"),
    "a rule of itself": ({"grammar": "root ::= root root"}, "no text"),
    "parentheses": ({"grammar": "root ::= " + "(" * 8_000}, "too early"),
    "a long source": ({"grammar": "root ::= " + '"a" ' * 1_000_000}, "longer"),
    "an array of many": ({"json": {"type": "array", "minItems": 10**12}}, "more than"),
    "a long string": ({"json": {"type": "string", "minLength": 10**12}}, "longer"),
    "many patterns": (
        {"json": {"type": "array", "prefixItems": [{"type": "string", "pattern": EMPTY}] * 4_000}}, "longer"
    ),
    "a schema that doubles": (
        {"json": {"$ref": "#/$defs/d0", "$defs": {"d30": {"type": "null"}} | {
            f"d{n}": {"required": ["a", "b"], "additionalProperties": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(30)
        }}},
        "longer",
    ),
    "a schema of itself": ({"json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}}, "contains itself"),
    "a deep schema": ({"json": '{"items":' * 50_000 + "1" + "}" * 50_000}, "too deep"),
    "numbers beyond floats": ({"json": {"type": "integer", "minimum": 10**400, "multipleOf": 5e-324}}, "numbers"),
    "a tag of many": (
        {"structural_tag": json.dumps({"format": {
            "type": "sequence", "elements": [{"type": "regex", "pattern": EMPTY}] * 4_000}})},
        "longer",
    ),
    "a tag of a tag": (
        {"structural_tag": '{"format":' + '{"type":"sequence","elements":[' * 200 + "]}" * 200 + "}"},
        "deeper",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_by_its_field(name: str) -> None:
    asked, why = HOSTILE[name]
    (field,) = asked
    with pytest.raises(FormError, match=why) as refused:
        formed_text(None, asked)
    assert refused.value.field == f"structured_outputs.{field}"


@pytest.mark.parametrize(
    ("source", "text"), [("(a+)+" * 1_000, "a" * 1_000), ("(" * 900 + "){9999}" * 900, ""), ("a?" * 4_000, "")]
)
def test_a_form_with_many_texts_is_answered_by_its_shortest(source: str, text: str) -> None:
    assert shortest(regex(source)) == text


@pytest.mark.parametrize(
    ("schema", "matching"),
    [
        ({"type": "string", "pattern": "^[a-f]{4}$"}, '"[a-f]{4}"'),
        ({"type": "string", "pattern": r'"\\'}, r'"\\"\\\\"'),
        ({"type": "string", "format": "date"}, r'"\d{4}-\d\d-\d\d"'),
        ({"type": "string", "maxLength": 0}, '""'),
        ({"type": "integer", "exclusiveMinimum": 3, "multipleOf": 4}, "4"),
        ({"type": "integer", "maximum": -2.5}, "-3"),
        ({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, r"0\.\d+"),
        (
            {"type": "array", "prefixItems": [{"const": 1}, {"type": "null"}], "minItems": 3, "items": {}},
            r"\[1, null, {}\]",
        ),
        (
            {"required": ["next"], "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}},
            '{"next": {"next": null}}',
        ),
    ],
)
def test_a_value_has_the_constraints_of_its_schema(schema: dict[str, Any], matching: str) -> None:
    text = formed_text({"type": "json_schema", "json_schema": {"schema": schema}}, None)
    assert text is not None
    json.loads(text)
    assert re.fullmatch(matching, text)


@pytest.mark.parametrize(
    ("tag", "text"),
    [
        ({"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<f"]},
         '<f>{"color": "red", "sides": []}</f>'),
        ({"format": {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "a+"}, "end": ">"}}, "<a>"),
        ({"format": {"type": "or", "elements": [{"type": "const_string", "value": "z"}, {"type": "any_text"}]}}, "z"),
    ],
)  # fmt: skip
def test_a_structural_tag_is_answered_by_its_first_structure(tag: dict[str, Any], text: str) -> None:
    assert formed_text({"type": "structural_tag", **tag}, None) == text
    assert formed_text(None, {"structural_tag": json.dumps(tag)}) == text


SCHEMAS = st.recursive(
    st.sampled_from(
        [
            {"type": "string", "minLength": 3},
            {"type": "integer", "minimum": 4},
            {"type": "number"},
            {"type": "boolean"},
            {"type": "null"},
            {"type": ["string", "null"]},
            {"type": "string", "pattern": "[a-c]{2}x?"},
            {"const": 5},
            {"enum": ["a", 1]},
            {"$ref": "#/$defs/side"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda item, least: {"type": "array", "items": item, "minItems": least}, inner, st.integers(0, 2)),
        st.builds(lambda item: {"anyOf": [item]}, inner),
        st.dictionaries(st.sampled_from("abc"), inner).map(
            lambda of: {"type": "object", "properties": of, "required": sorted(of), "additionalProperties": False}
        ),
    ),
    max_leaves=6,
)


TYPES = {"string": str, "integer": int, "number": int | float, "boolean": bool, "null": type(None)}


def meets(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is one of a schema of those above."""
    match schema:
        case {"$ref": _}:
            return isinstance(value, int) and value >= 2
        case {"const": only}:
            return bool(value == only)
        case {"enum": allowed}:
            return value in allowed
        case {"anyOf": forms}:
            return any(meets(value, form) for form in forms)
        case {"type": "array", "items": item, "minItems": least}:
            return isinstance(value, list) and len(value) >= least and all(meets(each, item) for each in value)
        case {"type": "object", "properties": of}:
            return (
                isinstance(value, dict) and set(value) == set(of) and all(meets(value[name], of[name]) for name in of)
            )
        case {"type": [*kinds]}:
            return any(meets(value, {"type": kind}) for kind in kinds)
    if "pattern" in schema:
        return isinstance(value, str) and re.fullmatch(schema["pattern"], value) is not None
    least = schema.get("minimum", schema.get("minLength", 0))
    held = len(value) if isinstance(value, str) else value or 0
    return isinstance(value, TYPES[schema["type"]]) and held >= least


@given(SCHEMAS)
def test_every_schema_is_met(schema: dict[str, Any]) -> None:
    whole = {**schema, "$defs": {"side": {"type": "integer", "minimum": 2}}}
    text = formed_text({"type": "json_schema", "json_schema": {"schema": whole}}, None)
    assert text is not None
    assert meets(json.loads(text), schema)


def test_a_choice_and_a_schema_as_text_are_forms() -> None:
    assert formed_text(None, {"choice": ["yes", "no"]}) == "yes"
    assert formed_text(None, None, {"json_schema": json.dumps(SCHEMA)}) == '{"color": "red", "sides": []}'


@pytest.mark.parametrize("keyword", ["not", "if", "minProperties", "contains"])
def test_a_keyword_that_is_not_simulated_is_named(keyword: str) -> None:
    with pytest.raises(FormError, match=keyword):
        formed_text(None, {"json": {"type": "object", keyword: {}}})
