"""Good specs and what is put into them: the rows of ``specs.yaml``, and random changes that the schema leads."""

import copy
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from cluster.controlplane import ControlPlane
from cluster.resources import deployment
from hypothesis import strategies as st

from mmrouter_lib.api import SpecError
from mmrouter_lib.api.crd import definition

SPECS = Path(__file__).with_name("specs.yaml")
PATH = "/apis/mmrouter.io/v1alpha1/namespaces/{}/mmrouterdeployments"
_PART = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Object = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One row of a table. ``says`` is empty for what is allowed."""

    number: int
    of: str
    document: Object
    field: str
    says: str

    @property
    def id(self) -> str:
        return f"{self.number}-{self.field or self.of}"


def good() -> dict[str, Object]:
    return {name: deployment(name, copy.deepcopy(spec)) for name, spec in _tables()["good"].items()}


def cases(table: str) -> list[Case]:
    """Return the rows of a table in ``specs.yaml``, each with the whole object it makes."""
    return [_case(number, row) for number, row in enumerate(_tables()[table])]


def put(document: Object, path: str, value: Any) -> None:
    """Put a value into a decoded document, at ``spec.pools[0].name``; what is missing on the way is made."""
    *way, last = _parts(path)
    node: Any = document
    for part in way:
        node = node.setdefault(part, {}) if isinstance(part, str) else node[part]
    node[last] = value


def drop(document: Object, path: str) -> None:
    *way, last = _parts(path)
    node: Any = document
    for part in way:
        node = node[part]
    del node[last]


def create(cluster: ControlPlane, namespace: str, document: Object, *, store: bool = False) -> tuple[int, Object]:
    """Create the object, by default as a dry run; return the status and the answer. Unknown fields are errors."""
    params = {} if store else {"dryRun": "All"}
    answer = cluster.request("POST", PATH.format(namespace), document, fieldValidation="Strict", **params)
    return answer.status_code, answer.json()


def replace(cluster: ControlPlane, namespace: str, document: Object) -> tuple[int, Object]:
    path = f"{PATH.format(namespace)}/{document['metadata']['name']}"
    answer = cluster.request("PUT", path, document, fieldValidation="Strict", dryRun="All")
    return answer.status_code, answer.json()


BEYOND_CEL = ("is not a label name", "cannot be set here")
"""Sentences of Python's for what the server takes all the same: the syntax of label names in `nodeSelector`, as keys of
maps have no bound that a rule could be costed by, and shortened or upper-case spellings of owned flags."""


def surprising(error: SpecError) -> list[str]:
    """Return the sentences about a stored object that the server should have refused."""
    return [text for _, text in error.errors if not any(known in text for known in BEYOND_CEL)]


@cache
def _tables() -> Any:
    return yaml.safe_load(SPECS.read_text())


def _case(number: int, row: Object) -> Case:
    of = row.get("of", "minimal")
    document = good()[of]
    for path, value in row.get("set", {}).items():
        put(document, path, copy.deepcopy(value))
    if "drop" in row:
        drop(document, row["drop"])
    if "add" in row:
        document["spec"]["pools"].append(row["add"])
    if "cut" in row:
        del document["spec"]["pools"][row["cut"] :]
    return Case(number, of, document, row.get("field", ""), row.get("says", ""))


def _parts(path: str) -> list[str | int]:
    return [name or int(index) for name, index in _PART.findall(path)]


SPEC: Object = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

WORDS = [
    *("", "a", "a b", "A", "7", "-", "a-b", "é", "\u00a0", "a\n", "a/b", "a.b/c", "example.com/zone", "a" * 64),
    "b" * 400,
]
NUMBERS = ["0", "1", "0.5", "1.0", "1.01", "2", "-1", "1.", ".5", "1234567890", "0.0000000001"]
QUANTITIES = [
    *("0", "1", "1m", "0.1", "1500m", "8Gi", "20Mi", "1E", "1e3", "1E3", "2e-3", "1e18", "1e19", "1e99", "1n", "+1"),
    *("-1", "Mi", "7Ei", "8Ei", "9223372036854775806", "9223372036854775807", "9223372036854775808"),
    "99999999999999999999Ei",
]
HOSTS = [
    *("images.example", "*.cdn.example", "*", "a..b", "10.0.0.1", "999.1.1.1", "01.2.3.4", "::1", "[::1]", "[::1"),
    *("[10.0.0.1]", "fe80::1%eth0", "::ffff:1.2.3.4", "1:2", "a_b", "http://a", "a:80", "a" * 63 + ".b", "a" * 64),
    *("Images.Example", "[a]"),
]
RANGES = [
    *("10.0.0.0/8", "10.0.0.1/8", "10.0.0.0/08", "10.0.0.0/33", "10.0.0.0/255.0.0.0", "10.0.0.0", "0.0.0.0/0"),
    *("::/0", "fd00::/8", "fd00::1/8", "fe80::/64", "fe00::/7", "169.254.0.0/16", "169.254.1.0/24", "169.0.0.0/8"),
    *("::ffff:0:0/96", "::10.0.0.0/128", "::ffff:10.0.0.0/104", "FD00::/8", "fd00::/129", "010.0.0.0/8"),
]
ARGS = [
    *("--enforce-eager", "--block-size", "--block_size=1", "--page-size=1", "--page_size", "--tp", "-tp=2", "-tp.x"),
    *("--model-impl", "--no-enable-prefix-caching", "--kv-events-config.endpoint=x", "--block", "--BLOCK-SIZE", "{}"),
    *("x" * 2048, "x" * 2049, "--hf-overrides={}", '{"a": "--model"}', "--no-no-model", "--foo=--no-model"),
    *("--config.x_y", "--foo.model", ""),
]
NAMES = ["frontend", "worker", "fast", "a-name-of-21-letters-", "a", "x-", "-x", "render"]
TEXT = [*WORDS, *NUMBERS, *QUANTITIES, *HOSTS, *RANGES, *ARGS, *NAMES]
_made: dict[tuple[int, str], st.SearchStrategy[Any]] = {}
"""Strategies by the schema they were made from: making them costs more than drawing."""
ANYTHING = st.sampled_from([None, True, 0, -1, 1.5, "a", [], {}, [None], {"a": None}])


BY_FIELD = {
    "allowedHosts": HOSTS,
    "allowedCIDRs": RANGES,
    "args": ARGS,
    "overlapWeight": NUMBERS,
    "sampleRatio": NUMBERS,
    "target": NUMBERS,
    "name": NAMES,
}


@st.composite
def documents(draw: st.DrawFn) -> Object:
    """A good object after one to three changes: about half of them are bad, mostly for one reason."""
    document = good()[draw(st.sampled_from(["disaggregated", "encoders", "minimal"]))]
    for _ in range(draw(st.integers(1, 3))):
        _change(draw, document["spec"], SPEC, "spec")
    return document


def _change(draw: st.DrawFn, node: Any, schema: Object, field: str) -> None:
    if isinstance(node, list) and node and "items" in schema:
        place = draw(st.integers(0, len(node) - 1))
        match draw(st.sampled_from(["down", "down", "down", "replace", "drop", "twice"])):
            case "down" if isinstance(node[place], dict | list):
                _change(draw, node[place], schema["items"], field)
            case "drop":
                del node[place]
            case "twice":
                node.append(copy.deepcopy(node[place]))
            case _:
                node[place] = copy.deepcopy(draw(_values(schema["items"], field)))
    elif isinstance(node, dict) and "properties" in schema:
        name = draw(st.sampled_from(sorted(schema["properties"])))
        inner = schema["properties"][name]
        if isinstance(node.get(name), dict | list) and node[name] and draw(st.integers(0, 9)) > 1:
            _change(draw, node[name], inner, name)
        elif name in node and draw(st.integers(0, 5)) == 0:
            del node[name]
        else:
            node[name] = copy.deepcopy(draw(_values(inner, name)))
    elif isinstance(node, dict) and "additionalProperties" in schema:
        node[draw(st.sampled_from(WORDS))] = copy.deepcopy(draw(_values(schema["additionalProperties"], field)))


def _values(schema: Object, field: str) -> st.SearchStrategy[Any]:
    """Values that fit the schema or stand just beside it, and now and then something else altogether."""
    key = (id(schema), field)
    if key not in _made:
        fitting = st.deferred(lambda: _fitting(schema, field))
        _made[key] = st.integers(0, 19).flatmap(lambda die: fitting if die else ANYTHING)
    return _made[key]


def _fitting(schema: Object, field: str) -> st.SearchStrategy[Any]:
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], *schema["enum"], "other"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.sampled_from([*QUANTITIES, -1, 0, 1, 2**63 - 1])
    match schema["type"]:
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema["minimum"], schema.get("maximum", 2**31)
            return st.sampled_from([low - 1, low, low + 1, 2, 100, high, high + 1])
        case "string":
            longest = ["a" * schema["maxLength"], "a" * (schema["maxLength"] + 1)]
            return st.sampled_from([*BY_FIELD.get(field, TEXT), *longest])
        case "array":
            return st.lists(_values(schema["items"], field), max_size=3)
    if "properties" in schema:
        required = set(schema.get("required", ()))
        values = {name: _values(inner, name) for name, inner in schema["properties"].items()}
        return st.fixed_dictionaries(
            {name: value for name, value in values.items() if name in required},
            optional={name: value for name, value in values.items() if name not in required},
        )
    if "additionalProperties" in schema:
        return st.dictionaries(st.sampled_from(WORDS), _values(schema["additionalProperties"], field), max_size=3)
    return st.sampled_from([{}, {"spec": {"containers": [{"name": "engine", "env": None}]}}])
