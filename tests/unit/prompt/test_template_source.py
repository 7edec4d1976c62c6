"""The choice among a folder's templates, and tokens from tokenizer_config.json."""

import json
import shutil

import pytest

from mmrouter_lib.families import ModelFolderError
from mmrouter_lib.prompt import TemplateError

USER = [{"role": "user", "content": "hi"}]
TOOL = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture
def folder(tiny_folder, tmp_path):
    """A copy of the tiny model without any template."""
    copy = tmp_path / "model"
    shutil.copytree(tiny_folder, copy)
    (copy / "chat_template.jinja").unlink()
    return copy


def put(folder, name, **values):
    path = folder / name
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(old | values))


def test_the_processors_template_comes_first_but_not_for_a_request_with_tools(folder, load_prompter):
    put(folder, "tokenizer_config.json", chat_template="tokenizer")
    put(folder, "chat_template.json", chat_template="processor")
    prompter = load_prompter(folder)
    assert (prompter.render(USER), prompter.render(USER, tools=TOOL)) == ("processor", "tokenizer")
    put(folder, "processor_config.json", chat_template="nested")
    assert load_prompter(folder).render(USER) == "nested"


def test_the_file_alone_serves_both_and_gives_way_to_the_older_json(folder, load_prompter):
    put(folder, "tokenizer_config.json", chat_template="tokenizer")
    (folder / "chat_template.jinja").write_text("file")
    prompter = load_prompter(folder)
    assert (prompter.render(USER), prompter.render(USER, tools=TOOL)) == ("file", "file")
    put(folder, "chat_template.json", chat_template="processor")
    assert load_prompter(folder).render(USER) == "processor"


def test_named_templates_are_chosen_by_the_request(folder, load_prompter):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    put(folder, "tokenizer_config.json", chat_template=named)
    prompter = load_prompter(folder)
    assert (prompter.render(USER), prompter.render(USER, tools=TOOL)) == ("plain", "tools")
    assert load_prompter(folder, chat_template="tool_use").render(USER) == "tools"


def test_an_explicit_template_replaces_all_others(folder, load_prompter):
    put(folder, "tokenizer_config.json", chat_template="tokenizer")
    put(folder, "chat_template.json", chat_template="processor")
    prompter = load_prompter(folder, chat_template="{{ messages | length }}")
    assert (prompter.render(USER), prompter.render(USER, tools=TOOL)) == ("1", "1")


def test_without_a_template_a_request_is_refused_not_guessed(folder, load_prompter):
    with pytest.raises(TemplateError, match="no chat template"):
        load_prompter(folder).render(USER)
    put(folder, "chat_template.json", chat_template="processor")
    prompter = load_prompter(folder)
    assert prompter.render(USER) == "processor"
    with pytest.raises(TemplateError, match="with tools"):
        prompter.render(USER, tools=TOOL)


@pytest.mark.parametrize("value", [5, [5], [{"name": "default"}], {"default": 1}])
def test_a_template_that_is_no_text_is_refused_at_load(folder, load_prompter, value):
    put(folder, "tokenizer_config.json", chat_template=value)
    with pytest.raises(ModelFolderError, match="chat_template"):
        load_prompter(folder)


def test_a_processors_template_that_is_no_text_is_refused_at_load(folder, load_prompter):
    put(folder, "chat_template.json", chat_template=["a"])
    with pytest.raises(ModelFolderError, match="chat_template"):
        load_prompter(folder)


def test_named_template_files_need_an_explicit_choice(folder, load_prompter):
    (folder / "additional_chat_templates").mkdir()
    with pytest.raises(ModelFolderError, match="additional_chat_templates"):
        load_prompter(folder)
    assert load_prompter(folder, chat_template="mine").render(USER) == "mine"


def without_token(folder, text):
    """Take a special token out of tokenizer.json and return its number and its fields."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    taken = next(token for token in tokenizer["added_tokens"] if token["content"] == text)
    tokenizer["added_tokens"].remove(taken)
    path.write_text(json.dumps(tokenizer))
    return taken["id"], {key: value for key, value in taken.items() if key != "id"}


def test_case_36_a_token_that_only_tokenizer_config_has_is_one_token(folder, load_prompter):
    number, fields = without_token(folder, "<|video_pad|>")
    assert load_prompter(folder).expand("<|video_pad|>", []).ids.tolist() != [number]
    put(folder, "tokenizer_config.json", added_tokens_decoder={str(number): fields})
    assert load_prompter(folder).expand("<|video_pad|>", []).ids.tolist() == [number]


def test_case_36_a_token_that_is_not_special_is_one_token_and_survives_decoding(folder, load_prompter):
    number, fields = without_token(folder, "<|video_pad|>")
    put(folder, "tokenizer_config.json", added_tokens_decoder={str(number): {**fields, "special": False}})
    prompter = load_prompter(folder)
    assert prompter.expand("a<|video_pad|>", []).ids[-1] == number
    assert prompter.tokenizer.decode([number], skip_special_tokens=True) == "<|video_pad|>"


def test_a_token_that_cannot_have_the_id_it_claims_is_refused(folder, load_prompter):
    number, fields = without_token(folder, "<|video_pad|>")
    put(folder, "tokenizer_config.json", added_tokens_decoder={str(number + 5): fields})
    with pytest.raises(ModelFolderError, match="video_pad"):
        load_prompter(folder)


def test_a_named_special_token_that_no_list_holds_is_one_token_and_a_variable(folder, load_prompter):
    put(folder, "tokenizer_config.json", bos_token={"content": "<begin>"}, additional_special_tokens=["<more>"])
    put(folder, "chat_template.json", chat_template="{{ bos_token }}{{ eos_token }}{{ unk_token }}")
    prompter = load_prompter(folder)
    assert [len(prompter.expand(text, []).ids) for text in ("<begin>", "<more>")] == [1, 1]
    assert prompter.render(USER) == "<begin><|im_end|>"


def test_special_tokens_are_added_only_when_the_request_asks(folder, load_prompter):
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    begin = {"id": "<|endoftext|>", "type_id": 0}
    number = next(token["id"] for token in tokenizer["added_tokens"] if token["content"] == begin["id"])
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": begin}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {begin["id"]: {"id": begin["id"], "ids": [number], "tokens": [begin["id"]]}},
    }
    path.write_text(json.dumps(tokenizer))
    prompter = load_prompter(folder)
    plain = prompter.expand("hello", []).ids.tolist()
    assert number not in plain
    assert prompter.expand("hello", [], add_special_tokens=True).ids.tolist() == [number, *plain]


def test_begin_and_end_of_tokenizer_config_override_the_tokenizers_own(folder, load_prompter):
    begin, end = (load_prompter(folder).tokenizer.token_to_id(text) for text in ("<|endoftext|>", "<|im_end|>"))
    plain = load_prompter(folder).expand("hello", []).ids.tolist()
    put(folder, "tokenizer_config.json", bos_token="<|endoftext|>", eos_token="<|im_end|>", add_bos_token=True)
    assert load_prompter(folder).expand("hello", [], add_special_tokens=True).ids.tolist() == [begin, *plain]
    put(folder, "tokenizer_config.json", add_eos_token=True)
    assert load_prompter(folder).expand("hello", [], add_special_tokens=True).ids.tolist() == [begin, *plain, end]
    put(folder, "tokenizer_config.json", add_bos_token=False)
    assert load_prompter(folder).expand("hello", [], add_special_tokens=True).ids.tolist() == [*plain, end]
    put(folder, "tokenizer_config.json", add_bos_token=True, bos_token=None)
    assert load_prompter(folder).expand("hello", [], add_special_tokens=True).ids.tolist() == [*plain, end]


def test_a_named_token_that_the_tokenizer_lacks_is_special_whatever_its_entry_says(folder, load_prompter):
    number, fields = without_token(folder, "<|video_pad|>")
    entry = {str(number): {**fields, "special": False}}
    put(folder, "tokenizer_config.json", added_tokens_decoder=entry, pad_token="<|video_pad|>")
    assert load_prompter(folder).tokenizer.decode([number], skip_special_tokens=True) == ""


@pytest.mark.parametrize("broken", [{"x": {"content": "a"}}, {"1": {}}, {"1": 5}, ["a"]])
def test_a_token_list_that_cannot_be_read_is_refused(folder, load_prompter, broken):
    put(folder, "tokenizer_config.json", added_tokens_decoder=broken)
    with pytest.raises(ModelFolderError, match="added_tokens_decoder"):
        load_prompter(folder)


def test_a_placeholder_that_the_tokenizer_has_under_another_id_is_refused(folder, load_prompter):
    put(folder, "config.json", image_token_id=3)
    with pytest.raises(ModelFolderError, match="image_pad"):
        load_prompter(folder)


def test_a_tokenizer_file_that_cannot_be_read_is_refused(folder, load_prompter):
    for text in ("{}", "no json"):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
            load_prompter(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json"):
        load_prompter(folder)


def test_the_real_qwen2_placeholder_is_one_token(qwen2):
    # Its tokenizer.json alone lacks it (models/README, fact 1).
    assert qwen2.expand("<|image_pad|><|video_pad|>", []).ids.tolist() == [151655, 151656]


@pytest.mark.parametrize(
    ("prompter", "folder"),
    [
        ("qwen2", "Qwen--Qwen2-VL-2B-Instruct"),
        ("qwen3", "Qwen--Qwen3-VL-2B-Instruct"),
        ("llava", "llava-hf--llava-1.5-7b-hf"),
        ("llavanext", "llava-hf--llava-v1.6-mistral-7b-hf"),
        ("phi3", "microsoft--Phi-3-vision-128k-instruct"),
    ],
)
def test_case_36_every_token_that_a_real_folder_declares_is_one_token(prompter, folder, models, request):
    loaded = request.getfixturevalue(prompter)
    declared = json.loads((models / folder / "tokenizer_config.json").read_text())["added_tokens_decoder"]
    assert len(declared) >= 5
    for number, token in declared.items():
        assert loaded.expand(token["content"], []).ids.tolist() == [int(number)], token["content"]
