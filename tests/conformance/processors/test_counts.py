"""Every family against a third-party image processor: Hugging Face's, for Phi-3 that of mlx-vlm."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conformance.conftest import Record
from conformance.processors.conftest import Ask, Drawn

from mmrouter_lib import families
from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import Prompter, PromptImage

HUGGING_FACE = [
    "Qwen--Qwen2-VL-2B-Instruct",
    "Qwen--Qwen2.5-VL-7B-Instruct",
    "Qwen--Qwen3-VL-2B-Instruct",
    "llava-hf--llava-1.5-7b-hf",
    "llava-hf--llava-v1.6-mistral-7b-hf",
]
PHI3 = "microsoft--Phi-3-vision-128k-instruct"
CROPS = [16, 4, 1, 9]
PICTURE_CROPS = 4


def load(folder: Path, **options: int) -> Family:
    limits = SimpleNamespace(**{"min_pixels": None, "max_pixels": None, "num_crops": None, **options})
    family = families.load_family(folder, limits)
    assert family is not None
    return family


def counted(family: Family, sizes: Sequence[tuple[int, int]]) -> Iterator[int | None]:
    for width, height in sizes:
        try:
            yield family.count(width, height)
        except ImageSizeError:
            yield None


def different(sizes: Sequence[tuple[int, int]], ours: Sequence[object], theirs: Sequence[object]) -> list[object]:
    assert len(ours) == len(theirs) == len(sizes)
    return [line for line in zip(sizes, ours, theirs, strict=True) if line[1] != line[2]]


def image(family: Family, drawn: Drawn) -> PromptImage:
    size = probe(drawn.path.read_bytes(), max_pixels=10**8, exif=family.rotates_exif)
    return PromptImage(bytes(32), family.count(size.width, size.height))


def chats(pictures: list[Drawn]) -> list[list[Drawn]]:
    """Group the pictures into chats of one, two and three."""
    lengths, groups = (1, 2, 3), []
    while pictures:
        length = lengths[len(groups) % 3]
        groups.append(pictures[:length])
        pictures = pictures[length:]
    return groups


@pytest.fixture(scope="module")
def hugging_face(
    ask: Ask, model: Callable[[str], Path], sizes: list[tuple[int, int]], pictures: list[Drawn]
) -> dict[str, Any]:
    """The answers for all five folders, of one process: it takes longer to start than to answer."""
    asked = [{"files": [str(drawn.path) for drawn in group], "text": group[0].text} for group in chats(pictures)]
    answers = ask("hugging_face.py", models=[str(model(name)) for name in HUGGING_FACE], sizes=sizes, chats=asked)
    return {Path(folder).name: answer for folder, answer in answers.items()}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_case_24_counts_of_drawn_sizes_are_those_of_the_hugging_face_processor(
    name: str, hugging_face: dict[str, Any], model: Callable[[str], Path], sizes: list[tuple[int, int]], record: Record
) -> None:
    theirs = hugging_face[name]["counts"]
    wrong = different(sizes, list(counted(load(model(name)), sizes)), theirs)
    record(f"processor {name}: sizes, refused, mismatches", [len(sizes), theirs.count(None), len(wrong)])
    assert not wrong, wrong[:10]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_case_24_prompts_with_drawn_pictures_are_those_of_the_hugging_face_processor(
    name: str, hugging_face: dict[str, Any], model: Callable[[str], Path], pictures: list[Drawn], record: Record
) -> None:
    family = load(model(name))
    prompter = Prompter.load(model(name), family=family)
    wrong = []
    groups = chats(pictures)
    for group, ids in zip(groups, hugging_face[name]["ids"], strict=True):
        content = [*({"type": "image_url"} for _ in group), {"type": "text", "text": group[0].text}]
        text = prompter.render([{"role": "user", "content": content}])
        expanded = prompter.expand(text, [image(family, drawn) for drawn in group], add_special_tokens=True)
        if expanded.ids.tolist() != ids:
            wrong.append([drawn.path.name for drawn in group])
    record(f"processor {name}: pictures, prompts, mismatches", [len(pictures), len(groups), len(wrong)])
    assert not wrong, wrong[:10]


@pytest.fixture(scope="module")
def mlx(ask: Ask, mlx_vlm: Path, sizes: list[tuple[int, int]], pictures: list[Drawn]) -> Any:
    files = [str(drawn.path) for drawn in pictures]
    return ask("mlx_phi3v.py", str(mlx_vlm), crops=CROPS, sizes=sizes, pictures=files, picture_crops=PICTURE_CROPS)


@pytest.mark.parametrize("crops", CROPS)
def test_case_24_phi3_counts_of_drawn_sizes_are_those_of_mlx_vlm(
    crops: int, mlx: Any, model: Callable[[str], Path], sizes: list[tuple[int, int]], record: Record
) -> None:
    theirs = mlx["counts"][str(crops)]
    wrong = different(sizes, list(counted(load(model(PHI3), num_crops=crops), sizes)), theirs)
    record(f"processor {PHI3}, {crops} crops: sizes, refused, mismatches", [len(sizes), theirs.count(None), len(wrong)])
    assert not wrong, wrong[:10]


def test_case_24_phi3_tiles_and_tokens_of_drawn_pictures_are_those_of_mlx_vlm(
    mlx: Any, model: Callable[[str], Path], pictures: list[Drawn], record: Record
) -> None:
    family = load(model(PHI3), num_crops=PICTURE_CROPS)
    wrong = [
        drawn.path.name
        for drawn, theirs in zip(pictures, mlx["pictures"], strict=True)
        if image(family, drawn).count != theirs["tokens"] or not 1 <= theirs["tiles"] <= PICTURE_CROPS
    ]
    record(f"processor {PHI3}: pictures, mismatches", [len(pictures), len(wrong)])
    assert not wrong, wrong[:10]
