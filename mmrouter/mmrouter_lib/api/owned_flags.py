"""Engine flags that belong to fields of the resource: refused in ``args``, with the field that replaces them.

Python knows every spelling that engines take. CEL sees what stays within the API server's cost budget: underscores,
``=``, dotted suffixes and ``--no-``. A shortened or upper-case flag passes the server and becomes SpecValid=False.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

from mmrouter_lib.api.rules import broken, validation

EngineType = Literal["vllm", "sglang"]


def owned_flags(engine: EngineType) -> Mapping[str, str]:
    """Return the flags of an engine that ``args`` must not set -> the field to use instead, empty for none."""
    # The engine adapters import the models, so the arrow back is taken at call time.
    match engine:
        case "vllm":
            from mmrouter_lib.engines.vllm.launch import OWNED_FLAGS as OF_VLLM  # noqa: PLC0415

            return OF_VLLM
        case "sglang":
            from mmrouter_lib.engines.sglang.launch import OWNED_FLAGS as OF_SGLANG  # noqa: PLC0415

            return OF_SGLANG


def refuse_owned(path: str, args: Sequence[str], engine: EngineType) -> None:
    """Raise for an argument that is an owned flag, in any spelling engines take."""
    if not args:
        return
    owned = owned_flags(engine)
    for number, arg in enumerate(args):
        for name, field in owned.items():
            if is_flag(arg, name):
                raise broken(f"{path}[{number}]", f"{arg:.80} sets {_sentence(name, field)}")


def is_flag(arg: str, name: str) -> bool:
    """Whether ``arg`` sets the flag ``name``: `-x`, `--a-b`, `--a_b`, `--a-b=1`, `--a-b.c`, `--no-a-b`, shortened."""
    flag = arg.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
    if not flag.startswith("--"):
        return flag == name
    # Argument parsers take an unambiguous beginning for the whole flag.
    flag = flag.lower()
    return any(
        spelling == name or (len(spelling) > len("--") and name.startswith(spelling))
        for spelling in (flag, flag.replace("--no-", "--", 1))
    )


def engine_validations() -> list[dict[str, str]]:
    """Return the CEL rules over ``args`` of ``spec.engine``, where ``self`` is the engine."""
    return [
        validation(
            f"self.type != '{engine}' || !has(self.args) || !{_exists('self.args', engine)}",
            _MESSAGE,
            path="args",
            says=f"{_sentences('self.args', engine)}[0]",
        )
        for engine in get_args(EngineType)
    ]


def pool_validations() -> list[dict[str, str]]:
    """Return the CEL rules over ``args`` of all pools, where ``self`` is the spec."""
    return [
        validation(
            f"self.engine.type != '{engine}' || !self.pools.exists(p, has(p.args) && {_exists('p.args', engine)})",
            _MESSAGE,
            path="pools",
            says=f"self.pools.map(p, has(p.args) ? {_sentences('p.args', engine)}"
            ".map(sentence, 'pool ' + p.name + ': ' + sentence) : [])"
            ".filter(sentences, size(sentences) > 0)[0][0]",
        )
        for engine in get_args(EngineType)
    ]


_MESSAGE = "args must not set what a field of this resource, or the operator, sets"
_NAME = "a.replace('_', '-').replace('--no-', '--', 1).replace('.', '=').split('=', 2)[0]"
"""CEL for the name of the flag in argument ``a``; Python's :func:`is_flag` finds all of these too."""


def _sentence(name: str, field: str) -> str:
    return f"{name}, which is not yours to set here" + (f"; use spec.{field}" if field else "")


def _exists(args: str, engine: EngineType) -> str:
    """CEL for: an argument of the list is an owned flag."""
    return f"{args}.exists(a, {_NAME} in {json.dumps(list(owned_flags(engine)))})"


def _sentences(args: str, engine: EngineType) -> str:
    """CEL for the sentences about those arguments of the list that are owned flags."""
    table = json.dumps({name: f"args set {_sentence(name, field)}" for name, field in owned_flags(engine).items()})
    return f"{args}.map(a, {table}[?{_NAME}].orValue('')).filter(sentence, sentence != '')"
