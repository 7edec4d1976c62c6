"""What is read of a tokenizer's own code; ``tests/conformance/vllm/test_kimi.py`` has a whole folder."""

import shutil
from pathlib import Path

import pytest

from mmrouter_lib.tokenizer_code import TokenizerCode, read_tokenizer_code

CODE = """
class TikTokenTokenizer(Base):
    num_reserved_special_tokens: int = 256
    pat_str = "|".join([r"\\p{Han}+", r"\\s+"])

    def encode(self, text):
        return []
"""
RENDERS = """
    def apply_chat_template(self, conversation, tools=None, tokenize=False, thinking=True, *, keep=False, **others):
        return super().apply_chat_template(conversation, tools=deep_sort_dict(tools), thinking=thinking, **others)
"""
NAMED = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
STAND_IN = Path(__file__).parents[3] / "hack" / "engines" / "folder_code" / "tokenization_kimi.py"


@pytest.fixture
def read(tmp_path: Path):
    def of(text: str | None = CODE, described: object = NAMED) -> TokenizerCode | None:
        (tmp_path / "tiktoken.model").touch()
        if text is not None:
            (tmp_path / "tokenization_kimi.py").write_text(text)
        return read_tokenizer_code(tmp_path, described)

    return of


def test_constants_of_the_class_are_read(read):
    assert read() == TokenizerCode(r"\p{Han}+|\s+", 256, {}, "given")
    assert read(CODE.replace('"|".join([r"\\p{Han}+", r"\\s+"])', r'r"\S+"')) == TokenizerCode(r"\S+", 256, {}, "given")


def test_defaults_of_its_own_variables_are_read_and_nothing_is_run(read):
    assert read("raise SystemExit\n" + CODE + RENDERS) == TokenizerCode(
        r"\p{Han}+|\s+", 256, {"thinking": True, "keep": False}, "sorted"
    )


@pytest.mark.parametrize(
    ("call", "form"),
    [
        ("encode_tools_to_typescript_style(deep_sort_dict(tools))", "typescript"),
        ("deep_sort_dict(tools)", "sorted"),
        ("tools", "given"),
        ("encode_tools_to_typescript_style(tools)", "unknown"),
        ("shown(tools)", "unknown"),
        ("json.dumps(tools)", "unknown"),
    ],
)
def test_the_form_of_tools_is_that_of_the_functions_that_are_called(read, call, form):
    assert read(CODE + RENDERS.replace("deep_sort_dict(tools)", call)).tools == form


def test_the_class_may_be_named_in_every_form_of_auto_map(read):
    name = "tokenization_kimi.TikTokenTokenizer"
    assert all(read(described={"auto_map": each}) for each in ([name, None], {"AutoTokenizer": name}))
    assert read(described={"auto_map": {"AutoProcessor": name}}) is None
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
    assert read_tokenizer_code(tmp_path, NAMED) is None
    (tmp_path / "tiktoken.model").touch()
    code = read_tokenizer_code(tmp_path, NAMED)
    assert code is not None
    assert (code.reserved, code.variables, code.tools) == (256, {"thinking": True}, "typescript")
