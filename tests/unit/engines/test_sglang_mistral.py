"""Mistral's own tokenizer on SGLang. Against the engine's code: ``tests/conformance/sglang/test_mistral.py``."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from unit.prompt.message_values import USER, check_new_text_is_bounded
from unit.prompt.tekken import write

from mmrouter_lib.engines.prompters import response_chat
from mmrouter_lib.engines.sglang.prompts.mistral import SglangMistralPrompter
from mmrouter_lib.engines.text_models import UnpredictedError, load_text_prompter
from mmrouter_lib.families import ModelFolderError, NotModelledError, PromptImage
from mmrouter_lib.prompt import TemplateError

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
IMAGES, BREAKS, ENDS = 10, 12, 13  # ids of the tokens that images are made of


def folder_of(root: Path, model_type: str = "mistral", **files: object) -> Path:
    write(root)
    (root / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, content in files.items():
        (root / f"{name}.json").write_text(json.dumps(content))
    return root


def pictured_folder(root: Path, image_id: int = IMAGES) -> Path:
    vision = {"model_type": "pixtral", "patch_size": 14, "image_size": 1540}
    config = {"model_type": "mistral3", "image_token_index": image_id, "vision_config": vision}
    processor = {"patch_size": 14, "spatial_merge_size": 2}
    sizes = {"size": {"longest_edge": 1540}}
    return folder_of(root, config=config, preprocessor_config=sizes, processor_config=processor, tokenizer={})


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> SglangMistralPrompter:
    return loaded(folder_of(tmp_path_factory.mktemp("texts"), tokenizer={}))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> SglangMistralPrompter:
    return loaded(pictured_folder(tmp_path_factory.mktemp("pictures")))


def loaded(folder: Path) -> SglangMistralPrompter:
    made = load_text_prompter("sglang", folder)
    assert isinstance(made, SglangMistralPrompter)
    return made


def text(prompter: SglangMistralPrompter, *messages: dict, **fields: object) -> str:
    return prompter.decode(prompter.prompt({"messages": list(messages), **fields}, ()).ids)


def asked(*parts: dict) -> dict:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def image(number: int, *size: int) -> PromptImage:
    return PromptImage(bytes([number]) * 32, 1, size or None)


def test_without_media_the_librarys_ids_are_the_prompt(texts, pictures):
    for prompter in (texts, pictures):
        ids = prompter.prompt({"messages": [USER]}, ()).ids
        assert (ids[0], ids[1], ids[-1]) == (1, 3, 4)  # <s>, [INST] and [/INST] are tokens
        assert text(prompter, USER) == "<s>[INST]How are you?[/INST]"


def test_beside_an_image_control_tokens_are_letters(pictures):
    made = pictures.prompt(asked({"type": "text", "text": "a"}, IMAGE), [image(1, 56, 28)])
    assert not {1, 3, 4} & {*made.ids}
    assert pictures.decode(made.ids) == "<s>[INST]a[IMG][IMG][IMG_END][/INST]"


def test_each_row_of_an_image_is_a_run_of_its_own(pictures):
    made = pictures.prompt(asked(IMAGE, IMAGE), [image(1, 56, 56), image(2, 28, 28)])
    first, second = made.spans
    assert (first.identity, second.identity) == (bytes([1]) * 32, bytes([2]) * 32)
    runs = [made.ids[start : start + span.run].tolist() for span in made.spans for start in span.starts]
    assert runs == [[IMAGES] * 2, [IMAGES] * 2, [IMAGES]]
    at = first.offset
    assert made.ids[at : at + 7].tolist() == [IMAGES, IMAGES, BREAKS, IMAGES, IMAGES, ENDS, IMAGES]


def test_typed_tokens_of_images_are_texts_in_chats_and_tokens_in_completions(texts, pictures):
    assert IMAGES not in texts.prompt({"messages": [{"role": "user", "content": "[IMG]"}]}, ()).ids
    assert texts.completion("a[IMG][IMG_BREAK]", add_special_tokens=False).ids[-2:].tolist() == [IMAGES, BREAKS]
    typed = asked({"type": "text", "text": "[IMG_BREAK]"}, IMAGE)
    assert BREAKS in pictures.prompt(typed, [image(1, 28, 28)]).ids


def test_a_typed_place_for_an_image_beside_images_is_not_predicted(pictures):
    with pytest.raises(NotModelledError):
        pictures.prompt(asked({"type": "text", "text": "[IMG]"}, IMAGE), [image(1, 28, 28)])


def test_an_answer_that_says_nothing_is_left_out(texts):
    silent = [{"role": "assistant", "content": " "}, {"role": "assistant", "content": None}]
    assert text(texts, USER, silent[0], silent[1], USER) == text(texts, USER, USER)


def test_a_final_answer_is_a_question_unless_it_is_continued(texts):
    said = {"role": "assistant", "content": "Fine"}
    assert text(texts, USER, said) == text(texts, USER, {"role": "user", "content": "Fine"})
    assert text(texts, USER, said, continue_final_message=True) == text(texts, USER) + "Fine"


def test_variables_that_the_library_does_not_know_have_no_effect(texts):
    assert text(texts, USER, chat_template_kwargs={"colour": 1}) == text(texts, USER)
    for name in ("temperature", "max_length", "seed"):
        with pytest.raises(NotModelledError, match=name):
            text(texts, USER, chat_template_kwargs={name: 1})


def test_what_the_library_refuses_is_refused_with_its_first_reason(texts):
    result, tools = {"role": "tool", "tool_call_id": "123456789", "content": "x"}, [{"function": {"name": "now"}}]
    with pytest.raises(TemplateError, match="Unexpected role 'tool'"):
        text(texts, USER, result, tools=[{"type": "function", **tools[0]}])
    for fields in ({"reasoning_effort": "high"}, {"tools": [{"type": "function", "function": {"name": "a b!"}}]}):
        with pytest.raises(TemplateError):
            text(texts, USER, **fields)


def test_images_of_a_model_of_texts_are_not_predicted(texts):
    with pytest.raises(NotModelledError) as caught:
        texts.prompt(asked(IMAGE), [image(1, 28, 28)])
    assert caught.value.reason == "family:mistral"


def test_a_request_of_responses_is_the_chat_that_it_becomes(texts):
    chat_of = response_chat("sglang", texts)
    assert chat_of is not None
    assert text(texts, *chat_of({"input": "How are you?"}).body["messages"]) == text(texts, USER)


def test_work_is_bounded_whatever_pieces_a_text_has(texts):
    check_new_text_is_bounded(texts, completion="a[IMG]" * 10)


def test_tekken_beside_tokenizer_json_is_taken_for_mistrals_types_alone(tmp_path):
    folder = folder_of(tmp_path, tokenizer={})
    assert isinstance(load_text_prompter("sglang", folder), SglangMistralPrompter)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UnpredictedError, match=r"tokenizer:tekken\.json"):
        load_text_prompter("sglang", folder)
    (folder / "tokenizer.json").unlink()
    assert isinstance(load_text_prompter("sglang", folder), SglangMistralPrompter)


def test_what_is_not_predicted_has_a_reason(tmp_path, monkeypatch):
    folder = folder_of(tmp_path)
    with pytest.raises(UnpredictedError, match=r"tokenizer:tekken\.json"):
        load_text_prompter("sglang", folder, "{{ messages }}")  # by which the engine converts contents
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
        with pytest.raises(UnpredictedError, match=r"tokenizer:tekken\.json"):
            load_text_prompter("sglang", folder)
    (folder / "config.json").write_text('{"model_type": "voxtral", "audio_config": {}}')
    with pytest.raises(UnpredictedError, match="family:voxtral"):
        load_text_prompter("sglang", folder)


def test_processor_options_that_the_family_does_not_have_are_an_error(tmp_path):
    limits = SimpleNamespace(min_pixels=None, max_pixels=1_000, num_crops=None)
    with pytest.raises(ModelFolderError, match="max_pixels"):
        load_text_prompter("sglang", pictured_folder(tmp_path), processor=limits)


def test_another_id_of_an_images_token_in_config_json_is_an_error(tmp_path):
    with pytest.raises(ModelFolderError, match=r"\[IMG\] as 10"):
        load_text_prompter("sglang", pictured_folder(tmp_path, image_id=11))
