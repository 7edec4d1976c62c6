"""Regular expressions and grammars of the simulated engines, read by the library that both engines use for them.

The library comes with the engine's environment; it needs no engine and no model.
"""

from pathlib import Path

import pytest
from conformance.own_code import answer_of

from mmrouter_sim.constraints.grammars import grammar, regex
from mmrouter_sim.constraints.shortest import FormError, shortest

PROGRAM = """
import json, sys
import xgrammar
from xgrammar.testing import _is_grammar_accept_string as accepts

KINDS = {"regex": "from_regex", "ebnf": "from_ebnf", "lark": "from_lark"}


def asked(kind, source, text):
    try:
        read = getattr(xgrammar.Grammar, KINDS[kind])(source)
    except RuntimeError:
        return None
    return text is not None and accepts(read, text)


print(json.dumps([asked(*each) for each in json.load(sys.stdin)]))
"""
REGEX = [
    *("a", "a{2,3}", "^a$", "[a-z]+?", "(?<n>a)", "(?:a|b)c", "|a", "", "a|", "()", "é+", "]", "}", "a{0}", "[^]"),
    *(r"\d\w\s\D\W\S", ".", r"\x41\u0042", r"\.\/\-", r"[\]a-]", r"\v\f\n\r\t", r"\u{41}", "[^a-z0-9]", "(a+)+b"),
    *("(?=a)a", "(?!b)a", r"(a)\1", r"\bword\b", r"\p{L}", "(?i)a", "a{", "a{,3}", "x**", "a++", "(", ")", "[z-a]"),
    *("a{3,2}", "(a|b", "*a", "a{1", "a{2}{3}", "(?:", "[a", "\\", "[]", "(?>a)"),
]
EBNF = [
    *('root ::= "a" | "b"\n | "c"', 'root ::= x\nx ::= "a" x | ""', "root ::= [a-z]{2,3} # c", 'root ::= "a"{2,}'),
    *('root ::= [^"\\\\]', 'root ::= ("a" | "b")* "c"?', 'root::="a"', 'root ::= a-b\na-b ::= "x"', "root ::= ()"),
    *('root ::= "\\x41\\u0042\\n"', 'root ::= "é" [é-ü]', 'root ::= "a"\n\n"b"', "root ::= [\\]\\-]"),
    *('x ::= "a"', 'root ::= "a"{,3}', "root ::= 'a'", "root ::= y", "root ::= .", "root ::= /a/", "root ::= "),
    *('root ::= "a" |', "", 'root ::= "open', "root ::= [a", 'root ::= "a"**', 'root ::= "a"{3,2}', "root ::= [z-a]"),
    *('root ::= "a"\nroot ::= "b"', 'root ::= x x ::= "b"', 'root ::= "\\q"', 'ROOT ::= "a"'),
]
LARK = [
    *('start: "a"', 'start: x\nx: "a" x | "b"', "start: X\nX: /a+/", 'start: "a".."z"', 'start: "a"~2..3', "start:"),
    *('start: "a"{2,3}', '?start: ["a"] "b"', 'start: "a"i', 'start: "a" -> one | "b" -> two', "start: /x/ /y/"),
    *('start: (X|"c")+\nX: "x"\n%ignore " "', "start: NUMBER\n%import common.NUMBER", 'start: "a" // c', "start: ()"),
    *("start: INT WORD WS\n%import common (INT, WORD)\n%import common.WS", "start: Y\n%import common.FLOAT -> Y"),
    *("start: ESCAPED_STRING CNAME\n%import common.ESCAPED_STRING\n%import common.CNAME", "start: X*\nX: /\\d/"),
    *('x: "a"', "start: y", 'start.2: "a"', '%declare X\nstart: "a"', "start: /a(/", 'start: "a', "", "start: 'a'"),
    *("start: X & Y\nX: /a/\nY: /a/", 'start: ~X\nX: "a"', 'start: "a" start: "b"'),
]


def simulated(kind: str, source: str) -> str | None:
    try:
        return shortest(regex(source) if kind == "regex" else grammar(source, lark=kind == "lark"))
    except FormError:
        return None


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_the_simulator_answers_and_refuses_the_engines_library_does_too(
    engine: str, request: pytest.FixtureRequest
) -> None:
    env: Path = request.getfixturevalue(f"{engine}_env")
    kinds = {"regex": REGEX, "ebnf": EBNF} | ({"lark": LARK} if engine == "vllm" else {})
    asked = [(kind, source, simulated(kind, source)) for kind, sources in kinds.items() for source in sources]
    read = answer_of(env, ["-c", PROGRAM], asked)
    for each, accepted in zip(asked, read, strict=True):
        assert accepted is (None if each[2] is None else True), each
