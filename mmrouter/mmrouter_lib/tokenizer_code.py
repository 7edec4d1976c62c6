"""What the tokenizer's own code in a model folder states. The code is parsed and never run.

Kimi's folders have a class in ``tokenization_kimi.py`` that gives the vocabulary ``tiktoken.model`` to the library
``tiktoken``, with the pattern that splits texts into words. Its pattern, its number of special tokens and the variables
that it gives the chat template are constants in that file.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mmrouter_lib.model_folder import find_text

CODE: Final = "tokenization_kimi.py"
VOCABULARY: Final = "tiktoken.model"
_CLASS: Final = "TikTokenTokenizer"
_METHODS: Final = frozenset(
    {
        *("__init__", "encode", "decode", "pre_tokenizer_process", "apply_chat_template"),
        *("_tokenize", "_convert_token_to_id", "_convert_id_to_token", "_split_whitespaces_or_nonwhitespaces"),
        *("vocab_size", "get_vocab", "clean_up_tokenization", "convert_tokens_to_string", "save_vocabulary"),
    }
)
"""Methods of the class as published. With another one it may make other tokens."""
_SORTS, _WRITES = "deep_sort_dict", "encode_tools_to_typescript_style"
_CALLED: Final = frozenset({_SORTS, _WRITES, "super", "print"})
"""Functions that the published classes call for the chat template."""
_OF_THE_CALL: Final = frozenset({"self", "conversation", "tools", "tokenize", "add_generation_prompt"})
"""Arguments of ``apply_chat_template`` that are no variables of the class's own."""


ToolForm = Literal["given", "sorted", "typescript", "unknown"]
"""How tools reach the chat template: as the request has them; with the keys of every object in order; those, and a text
of them under ``tools_ts_str``; by code that is not known."""


@dataclass(frozen=True, slots=True)
class TokenizerCode:
    """Constants of a tokenizer's class.

    ``pattern`` matches a word, ``reserved`` ids behind the vocabulary's are special tokens. ``variables``: name ->
    default of those that the class gives the chat template.
    """

    pattern: str
    reserved: int
    variables: Mapping[str, Any]
    tools: ToolForm


def read_tokenizer_code(folder: Path, described: Mapping[str, Any]) -> TokenizerCode | None:
    """Return the constants of a folder's tokenizer, ``None`` where it has no code or code of another form.

    ``described``: its tokenizer_config.json. Raises :class:`~mmrouter_lib.model_folder.ModelFolderError`.
    """
    named = described.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    slow = named[0] if isinstance(named, list) and named else named
    if slow != f"{CODE.removesuffix('.py')}.{_CLASS}" or not (folder / VOCABULARY).is_file():
        return None
    text = find_text(folder, CODE)
    try:
        module = ast.parse(text or "")
    except (SyntaxError, ValueError):
        return None
    made = next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == _CLASS), None)
    return None if made is None else _constants(made)


def _constants(made: ast.ClassDef) -> TokenizerCode | None:
    methods = {node.name: node for node in made.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    values = dict(_assigned(made))
    pattern, reserved = _text(values.get("pat_str")), values.get("num_reserved_special_tokens")
    if not methods.keys() <= _METHODS or pattern is None or not isinstance(reserved, ast.Constant):
        return None
    if type(reserved.value) is not int or reserved.value < 0:
        return None
    renders = methods.get("apply_chat_template")
    variables = {} if renders is None else dict(_defaults(renders.args))
    if not all(isinstance(value, ast.Constant) for value in variables.values()):
        return None
    constants = {name: value.value for name, value in variables.items() if isinstance(value, ast.Constant)}
    return TokenizerCode(pattern, reserved.value, constants, "given" if renders is None else _tool_form(renders))


def _tool_form(renders: ast.AST) -> ToolForm:
    calls = {
        node.func.id for node in ast.walk(renders) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    methods = {node.attr for node in ast.walk(renders) if isinstance(node, ast.Attribute)}
    if not calls <= _CALLED or methods != {"apply_chat_template"} or (_WRITES in calls and _SORTS not in calls):
        return "unknown"
    return "typescript" if _WRITES in calls else "sorted" if _SORTS in calls else "given"


def _assigned(made: ast.ClassDef) -> Iterator[tuple[str, ast.expr]]:
    for node in made.body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                yield name, value


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield the class's own variables with their defaults, ``None`` for one without."""
    plain = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    pairs = [*zip(plain, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    yield from ((name.arg, default) for name, default in pairs if name.arg not in _OF_THE_CALL)


def _text(node: ast.expr | None) -> str | None:
    """Return a text, or texts in a list that are joined by one; ``None`` for anything else."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(func=ast.Attribute(value=between, attr="join"), args=[ast.List(elts=parts)], keywords=[]):
            texts = [_text(part) for part in (between, *parts)]
            known = [text for text in texts if text is not None]
            return known[0].join(known[1:]) if len(known) == len(texts) else None
    return None
