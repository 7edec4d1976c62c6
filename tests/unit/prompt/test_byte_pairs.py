"""Folders with vocab.json and merges.txt, and no tokenizer.json."""

import json

import pytest
from tokenizers import pre_tokenizers

from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.families.base.text import TextOnly
from mmrouter_lib.model_folder import ModelFolderError, digests
from mmrouter_lib.prompt import Prompter

WORDS = ["lo", "ok"]
END = "<|endoftext|>"
DESCRIBED = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"258": {"content": END, "special": True}}}


@pytest.fixture
def folder(tmp_path):
    """A folder of a text model whose vocabulary has two pairs, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: number for number, text in enumerate([*alphabet, *WORDS])}
    files = {
        "vocab.json": json.dumps(vocabulary),
        "merges.txt": "#version: 0.2\nl o\no k\n",
        "config.json": json.dumps({"model_type": "qwen3"}),
        "tokenizer_config.json": json.dumps(DESCRIBED),
        "chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def described(folder, **changes):
    (folder / "tokenizer_config.json").write_text(json.dumps(DESCRIBED | changes))


def ids(prompter, text):
    return prompter.completion(text, add_special_tokens=True).ids.tolist()


def test_words_are_merged_by_the_pairs_and_special_tokens_stay_whole(folder):
    prompter = load_text_prompter("vllm", folder)
    number = prompter.codec.token_id
    assert ids(prompter, f"look{END}") == [number("lo"), number("ok"), 258]
    assert ids(prompter, "e\u0301") == ids(prompter, "\u00e9"), "texts are composed first"


def test_a_family_takes_the_same_tokenizer(folder):
    prompter = Prompter.load(folder, family=TextOnly("internvl_chat"))
    assert ids(prompter, "look") == ids(load_text_prompter("vllm", folder), "look")


def test_tokens_are_put_around_a_text_where_the_folder_asks_for_them(folder):
    described(folder, bos_token=END, add_bos_token=True)
    assert ids(load_text_prompter("vllm", folder), "lo")[0] == 258


def test_a_tokenizer_json_comes_first(folder):
    made = load_text_prompter("vllm", folder)
    tokenizer = json.loads(made.tokenizer.to_str())
    tokenizer["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert ids(load_text_prompter("vllm", folder), "look") == [made.codec.token_id(letter) for letter in "look"]


def test_files_of_sentencepiece_come_first_for_a_class_that_reads_them(folder):
    (folder / "tokenizer.model").write_bytes(b"")
    assert len(ids(load_text_prompter("vllm", folder), "look")) == 2
    described(folder, tokenizer_class="LlamaTokenizer")
    with pytest.raises(UnpredictedError, match=r"tokenizer:tokenizer\.model"):
        load_text_prompter("vllm", folder)


def test_a_class_that_puts_a_blank_before_a_text_is_not_predicted(folder):
    described(folder, add_prefix_space=True)
    with pytest.raises(UnpredictedError, match="tokenizer:Qwen2Tokenizer"):
        load_text_prompter("vllm", folder)
    with pytest.raises(ModelFolderError, match="the class is Qwen2Tokenizer"):
        Prompter.load(folder, family=TextOnly("internvl_chat"))


@pytest.mark.parametrize(
    ("declared", "reason"),
    [
        ("GPT2Tokenizer", "tokenizer:GPT2Tokenizer"),
        ("PreTrainedTokenizerFast", "tokenizer:TokenizersBackend"),
        (None, "tokenizer:no_class"),
    ],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_other_classes_are_not_predicted(folder, engine, declared, reason):
    described(folder, tokenizer_class=declared)
    with pytest.raises(UnpredictedError, match=reason):
        load_text_prompter(engine, folder)


def test_a_family_of_another_class_is_refused_by_name(folder):
    described(folder, tokenizer_class="GPT2Tokenizer")
    with pytest.raises(ModelFolderError, match="the class is GPT2Tokenizer"):
        Prompter.load(folder, family=TextOnly("internvl_chat"))


@pytest.mark.parametrize("text", ["", "[]", '{"a": 0}'])
def test_files_that_do_not_fit_together_are_named(folder, text):
    (folder / "vocab.json").write_text(text)
    with pytest.raises(ModelFolderError, match=r"vocab\.json"):
        load_text_prompter("vllm", folder)


def test_both_files_belong_to_what_decides_a_prompt(folder):
    assert {"vocab.json", "merges.txt"} <= digests(folder).keys()
