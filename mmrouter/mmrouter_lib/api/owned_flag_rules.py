"""Refuse engine arguments that set an owned flag, in Python and as CEL rules of the CRD.

Python recognizes every spelling that engines accept. The CEL rules cover what fits the API server's cost budget:
underscores, ``=``, dotted suffixes and ``--no-``. A shortened or upper-case flag passes the server and becomes
SpecValid=False.
"""

import json
from collections.abc import Sequence

from mmrouter_lib.api.cross_field_rules import broken, validation
from mmrouter_lib.api.engine_traits import ENGINE_TYPES, EngineTraits, EngineType, OwnedFlag


def refuse_owned(path: str, args: Sequence[str], engine: EngineType) -> None:
    """Raise for an argument that is an owned flag, in any spelling engines take."""
    for number, arg in enumerate(args):
        for owned in ENGINE_TYPES[engine].owned_flags:
            if is_flag(arg, owned.name):
                flag = arg.split("=", 1)[0][:80]
                shown = flag if flag == owned.name else f"{flag} sets {owned.name}, which"
                instead = f"; use spec.{owned.field}" if owned.field else ""
                raise broken(f"{path}[{number}]", f"{shown} cannot be set here, because {owned.why}{instead}")


def is_flag(arg: str, name: str) -> bool:
    """Whether ``arg`` sets the flag ``name``: `-x`, `--a-b`, `--a_b`, `--a-b=1`, `--a-b.c`, `--no-a-b`, shortened."""
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if not flag.startswith("--"):
        return flag == name
    # Argument parsers accept an unambiguous prefix for the whole flag.
    flag = flag.lower()
    return any(
        spelling == name or (len(spelling) > len("--") and name.startswith(spelling))
        for spelling in (flag, flag.replace("--no-", "--", 1))
    )


def engine_validations() -> list[dict[str, str]]:
    """Return the CEL rules over ``args`` of ``spec.engine``, where ``self`` is the engine."""
    return [
        validation(
            f"self.type != '{engine.type}' || !has(self.args) || !{_exists('self.args', engine)}",
            _MESSAGE,
            path="args",
            says=f"{_sentences('self.args', engine)}[0]",
        )
        for engine in ENGINE_TYPES.values()
    ]


def pool_validations() -> list[dict[str, str]]:
    """Return the CEL rules over ``args`` of all pools, where ``self`` is the spec."""
    return [
        validation(
            f"self.engine.type != '{engine.type}' || !self.pools.exists(p, has(p.args) && {_exists('p.args', engine)})",
            _MESSAGE,
            path="pools",
            says=f"self.pools.map(p, has(p.args) ? {_sentences('p.args', engine)}"
            ".map(sentence, 'pool ' + p.name + ': ' + sentence) : [])"
            ".filter(sentences, size(sentences) > 0)[0][0]",
        )
        for engine in ENGINE_TYPES.values()
    ]


_MESSAGE = "args must not set flags that a field of this resource, or the operator, sets"
_NAME = "a.replace('_', '-').replace('--no-', '--', 1).replace('.', '=').split('=', 2)[0]"
"""CEL for the name of the flag in argument ``a``. :func:`is_flag` matches all of these too."""


def _sentence(owned: OwnedFlag) -> str:
    return f"{owned.name}, which cannot be set here" + (f"; use spec.{owned.field}" if owned.field else "")


def _exists(args: str, engine: EngineTraits) -> str:
    """CEL for: an argument of the list is an owned flag."""
    return f"{args}.exists(a, {_NAME} in {json.dumps([owned.name for owned in engine.owned_flags])})"


def _sentences(args: str, engine: EngineTraits) -> str:
    """CEL for the sentences about those arguments of the list that are owned flags."""
    table = json.dumps({owned.name: f"args set {_sentence(owned)}" for owned in engine.owned_flags})
    return f"{args}.map(a, {table}[?{_NAME}].orValue('')).filter(sentence, sentence != '')"
