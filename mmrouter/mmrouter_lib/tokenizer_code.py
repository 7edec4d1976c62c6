"""What the tokenizer's own code in a model folder states. The code is parsed and never run.

The folders of Kimi K2.5 and K2.6 have a class in ``tokenization_kimi.py`` that gives the vocabulary ``tiktoken.model``
to the library ``tiktoken``, with the pattern that splits texts into words. Pattern, number of special tokens, limits of
texts and variables of the chat template are constants in it. Where a part of the class that decides tokens is written
in another way, the class is not read.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from mmrouter_lib.model_folder import TIKTOKEN_VOCABULARY, TOKENIZER_CODE, TOOL_CODE, find_text

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
_STANDARD_ARGUMENTS: Final = frozenset({"self", "conversation", "tools", "tokenize", "add_generation_prompt"})
"""Arguments of ``apply_chat_template`` that are no variables of the class's own."""
_WHOLE_TEXT: Final = "MAX_ENCODE_CHARS", "MAX_NO_WHITESPACES_CHARS"
"""Ends of the names of two constants in ``encode``: of a text, and of a row in it."""
_TOOL_FUNCTIONS: Final = frozenset({_WRITES, "_openai_function_to_typescript_style", "_parse_parameter_type"})
"""Functions of the published file that writes tools."""

ToolForm = Literal["given", "sorted", "typescript"]
"""How tools reach the chat template: as the request has them; with the keys of every object in order; those, and a text
of them under ``tools_ts_str``."""


@dataclass(frozen=True, slots=True)
class TextLimits:
    """Characters up to which a tokenizer's code gives ``tiktoken`` a text as a whole: of all of it, and of a row of
    blanks alone or of others alone.
    """

    characters: int
    row: int

    def allow(self, text: str) -> bool:
        """Whether the code leaves a text whole. A row that is too long covers a multiple of ``row``, so these are
        looked at alone.
        """
        if len(text) > self.characters:
            return False
        return all(self._row_at(text, at) <= self.row for at in range(self.row, len(text), self.row))

    def _row_at(self, text: str, at: int) -> int:
        """Return the length of the row around a character, not more than ``row`` to either side of it."""
        before, behind = text[max(0, at - self.row) : at], text[at : at + self.row + 1]
        if text[at].isspace():
            return len(before) - len(before.rstrip()) + len(behind) - len(behind.lstrip())
        left = 0 if not before or before[-1].isspace() else len(before.rsplit(None, 1)[-1])
        return left + len(behind.split(None, 1)[0])


@dataclass(frozen=True, slots=True)
class TokenizerCode:
    """Constants of a tokenizer's class.

    ``pattern`` matches a word, ``reserved`` ids behind the vocabulary's are special tokens. ``variables``: name ->
    default of those that the class gives the chat template.
    """

    pattern: str
    reserved: int
    limits: TextLimits
    variables: Mapping[str, Any]
    tools: ToolForm


def read_tokenizer_code(folder: Path, described: Mapping[str, Any]) -> TokenizerCode | None:
    """Return the constants of a folder's tokenizer, ``None`` where it has no code or code of another form.

    ``described``: its tokenizer_config.json. Raises :class:`~mmrouter_lib.model_folder.ModelFolderError`.
    """
    named = described.get("auto_map")
    named = named.get("AutoTokenizer") if isinstance(named, dict) else named
    slow, *fast = named if isinstance(named, list) and named else [named]
    if (
        any(fast)
        or slow != f"{TOKENIZER_CODE.removesuffix('.py')}.{_CLASS}"
        or not (folder / TIKTOKEN_VOCABULARY).is_file()
    ):
        return None
    module = _parsed(folder, TOKENIZER_CODE)
    found = next((node for node in module.body if isinstance(node, ast.ClassDef) and node.name == _CLASS), None)
    code = None if found is None else _constants(found)
    if code is not None and code.tools == "typescript" and not _defined(_parsed(folder, TOOL_CODE)) >= _TOOL_FUNCTIONS:
        return None
    return code


def _parsed(folder: Path, name: str) -> ast.Module:
    """Return a file's code, none where it is missing or cannot be parsed."""
    try:
        return ast.parse(find_text(folder, name) or "")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module([], [])


def _defined(module: ast.Module) -> set[str]:
    return {node.name for node in module.body if isinstance(node, ast.FunctionDef)}


def _constants(found: ast.ClassDef) -> TokenizerCode | None:
    methods = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    values = dict(_assigned(found.body))
    pattern, reserved = _text(values.get("pat_str")), _number(values.get("num_reserved_special_tokens"))
    encode, init = methods.get("encode"), methods.get("__init__")
    if pattern is None or reserved is None or encode is None or init is None or not methods.keys() <= _METHODS:
        return None
    limits = [number for end in _WHOLE_TEXT if (number := _named(encode, end))]
    if len(limits) != len(_WHOLE_TEXT) or not _keeps_added_tokens(init):
        return None
    renders = methods.get("apply_chat_template")
    defaults = {} if renders is None else dict(_defaults(renders.args))
    variables = {name: each.value for name, each in defaults.items() if isinstance(each, ast.Constant)}
    tools = "given" if renders is None else _tool_form(renders, defaults)
    if len(variables) != len(defaults) or tools is None:
        return None
    return TokenizerCode(pattern, reserved, TextLimits(*limits), variables, tools)


def _keeps_added_tokens(init: ast.AST) -> bool:
    """Whether the class gives transformers the tokens at which that cuts a text, and reserves ids by its constant."""
    given = {keyword.arg for node in ast.walk(init) if isinstance(node, ast.Call) for keyword in node.keywords}
    sums = [node for node in ast.walk(init) if isinstance(node, ast.BinOp)]
    numbers = [part for node in sums for part in (node.left, node.right) if _number(part) is not None]
    return "added_tokens_decoder" in given and not numbers


def _tool_form(renders: ast.AST, variables: Mapping[str, Any]) -> ToolForm | None:
    """Return how a method gives tools to the template, ``None`` where it does more than the published ones."""
    nodes = list(ast.walk(renders))
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    names = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
    changed = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    rendered = [call for call in calls if isinstance(call.func, ast.Attribute)]
    if not names <= _CALLED or changed & {"conversation", *variables} or len(rendered) != 1:
        return None
    (call,) = rendered
    if ast.unparse(call.func) != "super().apply_chat_template":
        return None
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg is not None}
    whole = [ast.unparse(each) for each in call.args] == ["conversation"]
    if not whole or any(given.get(name) != name for name in variables):
        return None
    if _WRITES in names:
        return "typescript" if _SORTS in names else None
    return "sorted" if _SORTS in names else "given"


def _named(method: ast.AST, end: str) -> int | None:
    """Return a constant of a method whose name has this end."""
    return next((_number(value) for name, value in _assigned(list(ast.walk(method))) if name.endswith(end)), None)


def _assigned(nodes: "list[ast.AST] | list[ast.stmt]") -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
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
    yield from ((name.arg, default) for name, default in pairs if name.arg not in _STANDARD_ARGUMENTS)


def _number(node: ast.expr | None) -> int | None:
    value = node.value if isinstance(node, ast.Constant) else None
    return value if type(value) is int and value >= 0 else None


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
