"""Rules over several fields: one declaration is the model's validator and the API server's CEL rule.

A rule is a method of the model that returns whether it holds, with the same check in CEL (Kubernetes' Common Expression
Language) and the field to correct; its docstring is the error sentence. Tests run both forms over random specs and
compare the results.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

VALIDATIONS: Final = "x-kubernetes-validations"
NO_DEFAULT: Final = "x-mmrouter-no-default"
"""Marks a field whose default the API server does not fill in, because absence has a meaning of its own."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A rule that does not hold, where its path (relative, camelCase) or sentence depends on values."""

    path: str
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    path: str
    sentence: str
    cel: str
    says: str
    check: Callable[[Any], bool | Broken]


Check = TypeVar("Check", bound=Callable[[Any], bool | Broken])
_MARK: Final = "__mmrouter_rule__"


def rule(path: str, cel: str, *, says: str = "") -> Callable[[Check], Check]:
    """Declare a method as a rule: it returns whether the rule holds, or what is ``Broken``; its docstring is the error
    sentence. ``path`` names the field to correct, without list indexes, as CEL knows none. In ``cel`` optional fields
    without a default need ``has()``. ``says`` is a CEL expression for a sentence with values in it.
    """

    def mark(check: Check) -> Check:
        assert check.__doc__, f"{check} has no sentence"
        setattr(check, _MARK, Rule(path, check.__doc__, cel, says, check))
        return check

    return mark


def validation(cel: str, sentence: str, *, path: str = "", says: str = "") -> dict[str, str]:
    entry = {"rule": cel, "message": sentence}
    if says:
        entry["messageExpression"] = says
    if path:
        entry["fieldPath"] = f".{path}"
    return entry


def immutable(sentence: str) -> dict[str, Any]:
    """Return the ``json_schema_extra`` of a field that cannot change once it is set; only the server checks it."""
    return {VALIDATIONS: [validation("self == oldSelf", sentence)]}


def broken(path: str, sentence: str) -> PydanticCustomError:
    """Return the error of a rule over several fields; ``path`` (camelCase, relative) names the field to correct."""
    return PydanticCustomError("rule", "{sentence}", {"path": path, "sentence": sentence})


class Resource(BaseModel):
    """Immutable values, camelCase in JSON and YAML. Strict, as the API server: "2" is no number, "yes" no boolean."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
    )

    @classmethod
    def rules(cls) -> tuple[Rule, ...]:
        """Return the model's rules in the order of their declaration."""
        marks = (getattr(member, _MARK, None) for member in vars(cls).values())
        return tuple(mark for mark in marks if isinstance(mark, Rule))

    @classmethod
    def validations(cls) -> list[dict[str, str]]:
        """Return the checks of the API server over several fields of this model."""
        return [validation(own.cel, own.sentence, path=own.path, says=own.says) for own in cls.rules()]

    @model_validator(mode="after")
    def _keep_the_rules(self) -> "Resource":
        for own in self.rules():
            held = own.check(self)
            if isinstance(held, Broken):
                raise broken(held.path, held.sentence or own.sentence)
            if not held:
                raise broken(own.path, own.sentence)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler.resolve_ref_schema(handler(core_schema))
        for base in (base for base in reversed(cls.__mro__) if issubclass(base, Resource)):
            for name, text in _field_docstrings(base).items():
                schema["properties"][cls.model_fields[name].alias or name]["description"] = text
        if validations := cls.validations():
            schema[VALIDATIONS] = validations
        return schema


@cache
def _field_docstrings(model: type[Resource]) -> dict[str, str]:
    """Return field -> the string below it in the model's source.

    As pydantic's ``use_attribute_docstrings``, which parses the sources at every import instead: only the definition
    of the resource needs them.
    """
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(tree, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
