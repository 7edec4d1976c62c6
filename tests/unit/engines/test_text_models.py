"""Models without a family: which are predicted by template and tokenizer, and the reason of those that are not."""

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from unit.conftest import shared_folder
from unit.prompt.conftest import TINY

from mmrouter_lib.engines.sglang.hidden_groups import STATES, WINDOWS, hidden_groups
from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.prompt import NotModelledError, PromptImage
from mmrouter_lib.prompt.tokenizer_class import TokenizerClassError, as_class, tokenizer_class

BODY = {"messages": [{"role": "user", "content": "How are you?"}]}


@pytest.fixture
def folder(tmp_path: Path):
    def make(
        config: dict | None = None, described: dict | None = None, *, without: str = "", files: tuple = ()
    ) -> Path:
        for name in ("tokenizer.json", "chat_template.jinja"):
            shutil.copyfile(TINY / name, tmp_path / name)
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "new", **(config or {})}))
        given = {"tokenizer_class": "PreTrainedTokenizerFast", **(described or {})}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
        for name in files:
            (tmp_path / name).write_text("{}")
        if without:
            (tmp_path / without).unlink()
        return tmp_path

    return make


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_chat_is_the_templates_text_in_the_tokenizers_ids(folder, engine):
    prompter = load_text_prompter(engine, folder())
    text = "<|im_start|>user\nHow are you?<|im_end|>\n<|im_start|>assistant\n"
    prompt = prompter.prompt(BODY, [])
    assert text in prompter.codec.decode(prompt.ids)
    assert prompt.ids[-len(prompter.codec.encode(text, add_special_tokens=False)) :] == prompter.codec.encode(
        text, add_special_tokens=False
    )
    assert prompter.completion("a <|image_pad|> b").spans == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_chat_with_an_image_is_not_predicted(folder, engine):
    with pytest.raises(NotModelledError) as caught:
        load_text_prompter(engine, folder()).prompt(BODY, [PromptImage(bytes(32), 1)])
    assert caught.value.reason == "family:new"


UNPREDICTED = {
    "engine_prompts:DeepseekV32ForCausalLM": {"config": {"architectures": ["DeepseekV32ForCausalLM"]}},
    "family:new": {"config": {"is_encoder_decoder": True}},
    "tokenizer:missing": {"without": "tokenizer.json"},
    "tokenizer:tokenizer.model": {"without": "tokenizer.json", "files": ("tokenizer.model",)},
    "tokenizer:vocab.txt": {"without": "tokenizer.json", "files": ("vocab.txt",)},
    "tokenizer:tekken.json": {"files": ("tekken.json",)},
    "tokenizer:tokenizer.model.v3": {"files": ("tokenizer.model.v3",)},
    "tokenizer:remote_code": {"described": {"auto_map": {"AutoTokenizer": ["a.B", None]}}, "without": "tokenizer.json"},
    "tokenizer:no_class": {"described": {"tokenizer_class": None}},
    "tokenizer:BertTokenizer": {"described": {"tokenizer_class": "BertTokenizer"}},
    "tokenizer:Qwen2Tokenizer": {"described": {"tokenizer_class": "Qwen2TokenizerFast"}},  # other parts than its own
}


@pytest.mark.parametrize("reason", UNPREDICTED)
def test_what_is_not_predicted_has_a_reason_of_its_own(folder, reason):
    with pytest.raises(UnpredictedError) as caught:
        load_text_prompter("vllm", folder(**UNPREDICTED[reason]))
    assert str(caught.value) == reason


def test_a_tokenizer_of_the_models_own_code_is_found_in_the_older_form_too(folder):
    with pytest.raises(UnpredictedError, match="tokenizer:remote_code"):
        load_text_prompter("vllm", folder(described={"auto_map": ["a.B", None]}))


HYBRID = [
    {"full_attention_interval": 4, "linear_num_key_heads": 16},  # Qwen3-Next
    {"linear_attn_config": {"kda_layers": [1]}},  # Kimi Linear
    {"mamba_d_state": 128},  # Falcon-H1, Granite 4
    {"ssm_state_size": 128, "hybrid_override_pattern": "M-*"},  # Nemotron-H
    {"conv_L_cache": 3},  # LFM2
    {"layer_types": ["attn", "jet"]},  # Jet-Nemotron
    {"text_config": {"layer_types": ["linear_attention", "full_attention"]}},  # Qwen3.5
]
WINDOWED = [
    {"model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"]},
    {"model_type": "step3p5", "architectures": ["Step3p5ForCausalLM"]},
    {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {}},
    {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": {"layer_types": ["sliding_attention"]}},
]
PLAIN = [
    {"layer_types": ["full_attention"] * 2, "use_sliding_window": False, "sliding_window": None},
    {
        "layer_types": ["sliding_attention", "full_attention"],
        "model_type": "gemma3_text",
    },  # whole in the engine's cache
    {"sliding_window": 4096, "model_type": "mistral"},
    {"text_config": {"layer_types": None}, "vision_config": {"conv_bias": False}},
]


def test_layers_whose_evictions_sglang_does_not_tell_are_known_by_the_configuration():
    found = [{hidden_groups(config) for config in group} for group in (HYBRID, WINDOWED, PLAIN)]
    assert found == [{(STATES,)}, {(WINDOWS,)}, {()}]
    for config in (
        {"hybrid_layer_pattern": [0, 1], "architectures": ["MiMoV2FlashForCausalLM"]},
        {"is_hybrid_swa": True},
    ):
        assert hidden_groups(config) == (STATES, WINDOWS)


@pytest.mark.parametrize("config", [HYBRID[0], WINDOWED[1], *PLAIN[:3]])
def test_the_texts_of_models_with_and_without_such_layers_are_predicted_on_sglang(folder, config):
    assert load_text_prompter("sglang", folder(config)).prompt(BODY, []).ids


def test_models_with_states_are_predicted_on_vllm_whose_events_name_them(folder):
    assert load_text_prompter("vllm", folder(HYBRID[0])).prompt(BODY, []).ids


@pytest.mark.parametrize("config", [{"vision_config": {}}, {"image_token_id": 3}, {"mm_vision_tower": "clip"}])
def test_texts_of_a_vision_model_are_predicted_on_vllm_alone(folder, config):
    assert load_text_prompter("vllm", folder(config)).prompt(BODY, []).ids
    with pytest.raises(UnpredictedError, match="family:new"):
        load_text_prompter("sglang", folder(config))


def test_a_vision_model_whose_processor_has_another_template_is_not_predicted(folder):
    made = folder({"vision_config": {}}, files=("preprocessor_config.json",))
    (made / "chat_template.json").write_text(json.dumps({"chat_template": "another"}))
    with pytest.raises(UnpredictedError, match="family:new"):
        load_text_prompter("vllm", made)
    made = folder()
    (made / "preprocessor_config.json").unlink()
    assert "<|im_start|>" in load_text_prompter("vllm", made).render(BODY["messages"])


def test_an_older_folder_has_its_named_tokens_in_a_file_of_their_own(folder):
    made = folder()
    (made / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|endoftext|>"}}))
    (made / "chat_template.jinja").write_text("{{ bos_token }}!")
    prompter = load_text_prompter("vllm", made)
    assert prompter.render(BODY["messages"]) == "<|endoftext|>!"
    assert prompter.codec.begin_id == prompter.tokenizer.token_to_id("<|endoftext|>")


def test_the_class_of_a_tokenizer_follows_the_model_type_before_the_declaration():
    assert tokenizer_class("qwen2", "LlamaTokenizerFast") == "Qwen2Tokenizer"
    assert tokenizer_class("deepseek_v3", "LlamaTokenizerFast") == "TokenizersBackend"
    assert tokenizer_class("llama", "LlamaTokenizerFast") == "LlamaTokenizer"
    assert tokenizer_class("llama", "PreTrainedTokenizerFast") == "TokenizersBackend"
    with pytest.raises(TokenizerClassError, match="no_class"):
        tokenizer_class("llama", None)


def test_a_llama_tokenizer_puts_a_blank_at_the_beginning_of_a_text_only():
    models = shared_folder("MMROUTER_MODELS", "models")
    tokenizer = Tokenizer.from_file(str(models / "llava-hf--llava-1.5-7b-hf" / "tokenizer.json"))
    first = as_class(tokenizer, "LlamaTokenizer", {})
    legacy = as_class(tokenizer, "LlamaTokenizer", {"legacy": True})
    never = as_class(tokenizer, "LlamaTokenizer", {"add_prefix_space": False})
    for made, expected in ((first, ["▁a", "</s>", "b"]), (legacy, ["▁a", "</s>", "▁b"]), (never, ["a", "</s>", "b"])):
        assert made.encode("a</s>b", add_special_tokens=False).tokens == expected


def test_sglang_begins_texts_of_a_llama_tokenizer_whatever_its_file_says(folder):
    described = {"tokenizer_class": "LlamaTokenizerFast", "bos_token": "<|endoftext|>"}
    made = folder({"model_type": "deepseek_v3"}, described)
    begin = load_text_prompter("sglang", made).codec.begin_id
    assert load_text_prompter("sglang", made).completion("hello").ids[0] == begin
    assert load_text_prompter("vllm", made).completion("hello").ids[0] != begin
    assert load_text_prompter("sglang", folder(described=described | {"add_bos_token": False})).completion("x").ids
