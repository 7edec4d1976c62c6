"""Folders with a vocabulary of tiktoken; ``tests/conformance/vllm/test_kimi.py`` compares a real one."""

import base64
import json
from pathlib import Path

import pytest

from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.model_folder import ModelFolderError
from mmrouter_lib.prompt import PromptTooLongError

BYTES = [bytes([byte]) for byte in range(256)]
TOKENS = [*BYTES, b"bc", b"ab", b"abc", b"\xc3\xa9", b" abcd"]
CODE = """
class TikTokenTokenizer(Base):
    num_reserved_special_tokens = 4
    pat_str = "|".join([r"[^\\r\\n\\p{L}\\p{N}]?\\p{L}+", r"\\s+"])

    def __init__(self, vocab_file, added_tokens_decoder=None, **others):
        super().__init__(added_tokens_decoder=added_tokens_decoder, **others)

    def encode(self, text):
        TIKTOKEN_MAX_ENCODE_CHARS = 400_000
        MAX_NO_WHITESPACES_CHARS = 25_000

    def apply_chat_template(self, conversation, tools=None, thinking=True, **others):
        return super().apply_chat_template(conversation, tools=FORM(tools), thinking=thinking, **others)
"""
TOOL_CODE = """
def _parse_parameter_type(): ...
def _openai_function_to_typescript_style(): ...
def encode_tools_to_typescript_style(): ...
"""
TEMPLATE = """{% if tools %}{{ tools | tojson }}{% endif %}{{ tools_ts_str }}{{ messages[0].content }}
{%- if thinking %}<|think|>{% endif %}"""
BODY = {"messages": [{"role": "user", "content": "abc"}]}


def model(tokens: list[bytes], first: int = 0) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens, first))


@pytest.fixture
def folder(tmp_path: Path):
    def make(data: bytes = model(TOKENS), code: str = CODE.replace("FORM", "deep_sort_dict")) -> Path:
        think = {"content": "<|think|>", "special": False, "normalized": False}
        config = {
            "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
            "added_tokens_decoder": {str(len(TOKENS) + 1): think},
            "chat_template": TEMPLATE,
        }
        (tmp_path / "tiktoken.model").write_bytes(data)
        (tmp_path / "tokenization_kimi.py").write_text(code)
        (tmp_path / "tool_declaration_ts.py").write_text(TOOL_CODE)
        (tmp_path / "config.json").write_text('{"model_type": "kimi_k2"}')
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        return tmp_path

    return make


def ids(folder: Path, text: str) -> list[int]:
    return load_text_prompter("vllm", folder).completion(text).ids.tolist()


def test_neighbours_of_the_lowest_joint_rank_are_merged_first(folder):
    made = folder()
    assert ids(made, "abc") == [TOKENS.index(b"abc")]
    assert ids(made, "abcx") == [TOKENS.index(token) for token in (b"abc", b"x")]  # by "bc", before "ab"
    assert ids(made, "abx") == [TOKENS.index(token) for token in (b"ab", b"x")]
    assert ids(made, "é") == [TOKENS.index(b"\xc3\xa9")]


def test_a_word_that_is_a_token_is_that_token_whatever_its_parts(folder):
    assert ids(folder(), " abcd") == [TOKENS.index(b" abcd")]


def test_ids_behind_the_vocabulary_are_special_tokens_under_their_configured_names(folder):
    first = len(TOKENS)
    text = f"ab<|reserved_token_{first}|><|think|><|reserved_token_{first + 3}|>"
    assert ids(folder(), text) == [TOKENS.index(b"ab"), first, first + 1, first + 3]
    assert first + 4 not in ids(folder(), f"<|reserved_token_{first + 4}|>")


def test_variables_of_the_code_reach_the_template_unless_a_request_sets_them(folder):
    prompter = load_text_prompter("vllm", folder())
    assert prompter.prompt(BODY, ()).ids.tolist() == [TOKENS.index(b"abc"), len(TOKENS) + 1]
    quiet = BODY | {"chat_template_kwargs": {"thinking": False}}
    assert prompter.prompt(quiet, ()).ids.tolist() == [TOKENS.index(b"abc")]


TOOLS = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]}
SORTED = (
    '[{"function": {"description": null, "name": "f", "parameters": {"properties": {}, "type": "object"}}, '
    '"type": "function"}]'
)
TOOLS_AS_GIVEN = (
    '[{"type": "function", "function": {"name": "f", "description": null, '
    '"parameters": {"type": "object", "properties": {}}}}]'
)
WRITTEN = "# Tools\n\n## functions\nnamespace functions {\ntype f = (_: {}) => any;\n}\n"


@pytest.mark.parametrize(
    ("call", "shown"),
    [
        ("deep_sort_dict", SORTED),
        ("encode_tools_to_typescript_style(deep_sort_dict(tools), tools) and deep_sort_dict", SORTED + WRITTEN),
        ("", TOOLS_AS_GIVEN),
    ],
)
def test_tools_reach_the_template_as_the_code_gives_them(folder, call, shown):
    prompter = load_text_prompter("vllm", folder(code=CODE.replace("FORM", call)))
    assert prompter.decode(prompter.prompt(BODY | TOOLS, ()).ids) == shown + "abc<|think|>"


@pytest.mark.parametrize("text", ["x" * 25_001, "a" + "\n" * 25_001 + "a", "ab " * 133_334])
def test_texts_that_the_code_cuts_are_not_predicted(folder, text):
    prompter = load_text_prompter("vllm", folder())
    with pytest.raises(PromptTooLongError):
        prompter.completion(text)
    assert prompter.completion(text[: len(text) // 2]).ids


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"!! 0\n", "base64|padding|alphabet"),
        (b"YQ==\n", "unpack"),
        (b"YQ== x\n", "invalid literal"),
        (model(BYTES[:255]), "a byte has no token"),
        (model(BYTES, first=1), "ranks must be"),
        (model([*BYTES, b"a"]), "ranks must be"),
    ],
)
def test_a_vocabulary_that_cannot_be_used_is_refused(folder, data, complaint):
    with pytest.raises(ModelFolderError, match=complaint):
        load_text_prompter("vllm", folder(data))


def test_a_pattern_that_cannot_be_read_is_refused(folder):
    with pytest.raises(ModelFolderError, match="pattern of words"):
        load_text_prompter("vllm", folder(code=CODE.replace("FORM", "deep_sort_dict").replace("\\s+", "(")))


def test_code_of_another_form_is_not_predicted(folder):
    made = folder(code=CODE.replace("pat_str", "pattern"))
    for engine in ("vllm", "sglang"):
        with pytest.raises(UnpredictedError, match="tokenizer:remote_code"):
            load_text_prompter(engine, made)


def test_sglang_gives_the_code_a_whole_text_whose_rows_may_hold_special_tokens(folder):
    prompter = load_text_prompter("sglang", folder())
    row = "ab" * 6_000
    chat = f"{row}<|think|>{row}"
    assert prompter.prompt({"messages": [{"role": "user", "content": chat}]}, ()).ids
    assert prompter.completion(chat).ids
    with pytest.raises(PromptTooLongError):
        prompter.prompt({"messages": [{"role": "user", "content": chat + row}]}, ())
    with pytest.raises(PromptTooLongError):
        prompter.completion(chat + row)


def test_vllm_cuts_a_text_at_the_configured_tokens_alone(folder):
    prompter = load_text_prompter("vllm", folder())
    row = "ab" * 8_000
    assert prompter.completion(f"{row}<|think|>{row}").ids
    with pytest.raises(PromptTooLongError):
        prompter.completion(f"{row}<|reserved_token_{len(TOKENS)}|>{row}")
