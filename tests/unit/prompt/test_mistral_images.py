"""Images in Mistral's format, against ``mistral_common``. Against vLLM: ``tests/conformance/vllm/test_mistral.py``."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mistral_common.tokens.tokenizers.image import ImageConfig, ImageEncoder, SpecialImageIDs
from unit.prompt.tekken import write

from mmrouter_lib.engines.text_models import load_text_prompter
from mmrouter_lib.families import ImageSizeError, NotModelledError, PromptImage
from mmrouter_lib.families.base.mistral_images import MistralImages
from mmrouter_lib.prompt import MistralPrompter

SIZES = {"image_patch_size": 14, "max_image_size": 140}
SIDES = st.integers(1, 5_000)
PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}


@pytest.fixture(scope="module", params=["v3", "v7"])
def prompter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> MistralPrompter:
    loaded = load_text_prompter("vllm", write(tmp_path_factory.mktemp("tekken"), SIZES, request.param))
    assert isinstance(loaded, MistralPrompter)
    return loaded


def picture(number: int, *size: int) -> PromptImage:
    return PromptImage(bytes([number]) * 32, 1, size or None)


def asked(*parts):
    return {"messages": [{"role": "user", "content": list(parts)}]}


@given(width=SIDES, height=SIDES, longest=st.integers(1, 2_000), patch=st.integers(1, 40), merge=st.integers(1, 3))
def test_an_image_has_the_rows_of_the_librarys_grid(width, height, longest, patch, merge):
    library = ImageEncoder(ImageConfig(patch, longest, merge), SpecialImageIDs(10, 12, 13))
    columns, rows = library._image_to_num_tokens(SimpleNamespace(size=(width, height)))
    family = MistralImages.of("m", library)
    assert family.run(width, height) == [*([*[10] * columns, 12] * rows)[:-1], 13]
    assert family.count(width, height) == (columns + 1) * rows


def test_the_spans_are_the_images_in_the_order_of_the_parts(prompter):
    words = {"type": "text", "text": "[IMG] typed [IMG_END]"}
    images = [picture(1, 30, 14), picture(2, 1, 1), picture(3, 14, 28)]
    made = prompter.prompt(asked(words, PART, PART, words, PART), images)
    assert [span.identity for span in made.spans] == [image.identity for image in images]
    runs = [[10, 10, 10, 13], [10, 13], [10, 12, 10, 13]]
    assert [made.ids[span.offset : span.offset + span.length].tolist() for span in made.spans] == runs
    assert made.ids.tolist().count(10) == 6


@pytest.mark.parametrize("images", [[], [picture(1)], [picture(1, 14, 14)] * 2])
def test_an_image_without_a_size_or_a_part_is_not_predicted(prompter, images):
    with pytest.raises(NotModelledError):
        prompter.prompt(asked(PART), images)


def test_an_image_without_pixels_is_refused(prompter):
    with pytest.raises(ImageSizeError):
        prompter.family.count(0, 5)


def test_images_are_predicted_only_of_a_model_whose_parameters_have_a_tower(tmp_path):
    folder = write(tmp_path, SIZES)
    (folder / "params.json").write_text("{}")
    loaded = load_text_prompter("vllm", folder)
    assert not loaded.family.places_images
    with pytest.raises(NotModelledError):
        loaded.prompt(asked(PART), [picture(1, 14, 14)])
