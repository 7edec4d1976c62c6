"""What is read of a tokenizer's own code; ``tests/conformance/vllm/test_kimi.py`` has a whole folder."""

import shutil
from itertools import groupby
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmrouter_lib.tokenizer_code import TextLimits, TokenizerCode, read_tokenizer_code

CODE = """
class TikTokenTokenizer(Base):
    num_reserved_special_tokens: int = 256
    pat_str = "|".join([r"\\p{Han}+", r"\\s+"])

    def __init__(self, vocab_file, added_tokens_decoder=None, **others):
        self.special = range(len(ranks), len(ranks) + self.num_reserved_special_tokens)
        super().__init__(added_tokens_decoder=added_tokens_decoder, **others)

    def encode(self, text):
        TIKTOKEN_MAX_ENCODE_CHARS = 400_000
        MAX_NO_WHITESPACES_CHARS = 25_000
        return []
"""
RENDERS = """
    def apply_chat_template(self, conversation, tools=None, tokenize=False, thinking=True, *, keep=False, **others):
        return super().apply_chat_template(conversation, tools=deep_sort_dict(tools), thinking=thinking, keep=keep)
"""
TOOLS = """
def _parse_parameter_type(): ...
def _openai_function_to_typescript_style(): ...
def encode_tools_to_typescript_style(): ...
"""
LIMITS = TextLimits(400_000, 25_000)
NAMED = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
STAND_IN = Path(__file__).parents[3] / "hack" / "engines" / "folder_code" / "tokenization_kimi.py"


@pytest.fixture
def read(tmp_path: Path):
    def of(text: str | None = CODE, described: object = NAMED) -> TokenizerCode | None:
        (tmp_path / "tiktoken.model").touch()
        (tmp_path / "tool_declaration_ts.py").write_text(TOOLS)
        if text is not None:
            (tmp_path / "tokenization_kimi.py").write_text(text)
        return read_tokenizer_code(tmp_path, described)

    return of


def test_constants_of_the_class_are_read(read):
    assert read() == TokenizerCode(r"\p{Han}+|\s+", 256, LIMITS, {}, "given")
    assert read(CODE.replace('"|".join([r"\\p{Han}+", r"\\s+"])', r'r"\S+"')) == TokenizerCode(
        r"\S+", 256, LIMITS, {}, "given"
    )


def test_defaults_of_its_own_variables_are_read_and_nothing_is_run(read):
    assert read("raise SystemExit\n" + CODE + RENDERS) == TokenizerCode(
        r"\p{Han}+|\s+", 256, LIMITS, {"thinking": True, "keep": False}, "sorted"
    )


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ("encode_tools_to_typescript_style(deep_sort_dict(tools))", "typescript"),
        ("deep_sort_dict(tools)", "sorted"),
        ("tools", "given"),
    ],
)
def test_the_form_of_tools_is_that_of_the_functions_that_are_called(read, call, form):
    assert read(CODE + RENDERS.replace("deep_sort_dict(tools)", call)).tools == form


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("deep_sort_dict(tools)", "encode_tools_to_typescript_style(tools)"),
        ("deep_sort_dict(tools)", "shown(tools)"),
        ("deep_sort_dict(tools)", "json.dumps(tools)"),
        ("(conversation, tools=", "([system] + conversation, tools="),
        ("        return", "        conversation = [system] + conversation\n        return"),
        ("        return", "        thinking = True\n        return"),
        ("thinking=thinking", "thinking=True"),
        ("keep=keep", "**others"),
        ("super().apply", "self.apply"),
    ],
)
def test_a_class_that_does_more_for_the_template_than_the_published_ones_is_not_read(read, old, new):
    assert old in RENDERS
    assert read(CODE + RENDERS.replace(old, new)) is None


def test_a_class_whose_tools_another_file_writes_is_not_read(read, tmp_path):
    renders = RENDERS.replace("deep_sort_dict(tools)", "encode_tools_to_typescript_style(deep_sort_dict(tools))")
    assert read(CODE + renders) is not None
    (tmp_path / "tool_declaration_ts.py").write_text("def encode_tools_to_typescript_style(): ...")
    assert read_tokenizer_code(tmp_path, NAMED) is None


@given(st.lists(st.tuples(st.sampled_from("a \u00e9\n"), st.integers(1, 9)), max_size=12), st.integers(1, 9))
def test_a_text_is_allowed_where_no_row_of_blanks_or_of_others_is_longer(rows, most):
    text = "".join(character * length for character, length in rows)
    longest = max((len(list(row)) for _, row in groupby(text, str.isspace)), default=0)
    assert TextLimits(len(text), most).allow(text) == (longest <= most)
    assert not TextLimits(len(text) - 1, len(text) + 1).allow(text)


def test_the_class_may_be_named_in_every_form_of_auto_map(read):
    name = "tokenization_kimi.TikTokenTokenizer"
    assert all(read(described={"auto_map": each}) for each in ([name, None], {"AutoTokenizer": name}))
    assert read(described={"auto_map": {"AutoProcessor": name}}) is None
    assert read(described={"auto_map": [name, "tokenization_kimi.Fast"]}) is None
    assert read(described={"auto_map": ["tokenization_qwen.QWenTokenizer", None]}) is None
    assert read(described={}) is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "class Tik",
        "class Other:\n    pat_str = 'a'",
        CODE.replace("256", "'256'"),
        CODE.replace("256", "True"),
        CODE.replace("256", "-1"),
        CODE.replace("25_000", "0"),
        CODE.replace("TIKTOKEN_MAX_ENCODE_CHARS = 400_000", "pass"),
        CODE.replace("self.num_reserved_special_tokens)", "self.num_reserved_special_tokens + 2)"),
        CODE.replace("added_tokens_decoder=added_tokens_decoder, ", ""),
        "(" * 5000,
        CODE.replace('"|".join(', "joined("),
        CODE.replace('r"\\s+"', "OTHER"),
        CODE + "    def convert(self):\n        return 1\n",
        CODE + RENDERS.replace("thinking=True", "thinking=THINKS"),
        CODE + RENDERS.replace("thinking=True", "thinking").replace("tools=None, tokenize=False", "tools, tokenize"),
    ],
)
def test_code_of_another_form_is_not_read(read, text):
    assert read(text) is None


def test_a_folder_without_the_vocabulary_is_not_read(tmp_path):
    shutil.copyfile(STAND_IN, tmp_path / "tokenization_kimi.py")
    (tmp_path / "tool_declaration_ts.py").write_text(TOOLS)
    assert read_tokenizer_code(tmp_path, NAMED) is None
    (tmp_path / "tiktoken.model").touch()
    code = read_tokenizer_code(tmp_path, NAMED)
    assert code is not None
    assert (code.reserved, code.variables, code.tools) == (256, {"thinking": True}, "typescript")
