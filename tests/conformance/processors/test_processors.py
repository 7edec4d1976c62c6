"""Every family against a third-party image processor: Hugging Face's, for Phi-3 that of mlx-vlm."""

import random
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure, Shrunk, model_folder
from conformance.own_code import Prompts, answer_of
from conformance.setups import PROCESSED, REPOSITORIES
from conformance.workload import picture
from long_form import IS_LONG, parameters

from hack.build_once import cache_dir
from mmrouter_handover.plugin.start import install
from mmrouter_lib import families
from mmrouter_lib.families import Family, ImageSizeError
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import PlaceholderError, Prompter, PromptImage

VLLM_ALONE = ["internvl_chat", "nemotron_vl", "nemotron_omni", "kimi_k25"]
"""Families whose published files are for a processor of vLLM's and none of Hugging Face's."""
HUGGING_FACE = [
    "Qwen--Qwen2-VL-2B-Instruct",
    "Qwen--Qwen2.5-VL-7B-Instruct",
    "Qwen--Qwen3-VL-2B-Instruct",
    "llava-hf--llava-1.5-7b-hf",
    "llava-hf--llava-v1.6-mistral-7b-hf",
    "qwen3_5",
    *(name for name in PROCESSED if name not in VLLM_ALONE),
]
STAND_INS = {"qwen3_5", *PROCESSED}
"""Folders that ``hack/engines/unknown_families.py`` makes."""
PHI3 = "microsoft--Phi-3-vision-128k-instruct"
CROPS = [16, 4, 1, 9]
PICTURE_CROPS = 4
THIRD_PARTY = Path(__file__).with_name("third_party.py")
MLX_VLM = "0.7.10"
SIZES = 20_000 if IS_LONG else 1_000
PICTURES = 300 if IS_LONG else 30
OWN_PICTURES = 300 if IS_LONG else 10  # through vLLM's own front end, which takes longer
UNITS = (14, 16, 28, 32, 336)

KINDS = [
    *[("PNG", mode) for mode in ("RGB", "RGBA", "L", "LA", "P", "1", "I;16")],
    *[("JPEG", mode) for mode in ("RGB", "L", "CMYK")] * 2,
    *[("WEBP", mode) for mode in ("RGB", "RGBA")],
    ("GIF", "P"),
]


@dataclass(frozen=True)
class Drawn:
    path: Path
    text: str


Ask = Callable[..., Any]


@pytest.fixture(scope="session")
def sizes() -> list[tuple[int, int]]:
    """Drawn sizes: any, small ones, ones beside a whole number of units, ones of simple ratios, and very thin ones."""
    draw = random.Random(20_261_121)

    def side() -> int:
        return round(2 ** draw.uniform(0, 13))

    def near() -> int:
        unit = draw.choice(UNITS)
        return max(1, unit * draw.randint(1, 4000 // unit) * draw.choice((1, 2)) // 2 + draw.randint(-1, 1))

    def one() -> tuple[int, int]:
        match draw.randrange(5):
            case 0:
                return draw.randint(1, 4096), draw.randint(1, 4096)
            case 1:
                return draw.randint(1, 200), draw.randint(1, 200)
            case 2:
                return near(), near()
            case 3:
                unit, wide, high = draw.randint(1, 500), draw.randint(1, 12), draw.randint(1, 12)
                return unit * wide, unit * high
        return side(), side()

    return [one() for _ in range(SIZES)]


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Drawn]:
    draw, folder = random.Random(300), tmp_path_factory.mktemp("pictures")
    drawn = []
    for number in range(PICTURES):
        form, mode = draw.choice(KINDS)
        long = round(2 ** draw.uniform(3, 9.6))
        wide, high = draw.sample([long, max(1, round(long / 2 ** draw.uniform(0, 4)))], 2)
        turned = draw.randint(1, 8) if form in ("JPEG", "WEBP", "PNG") and draw.random() < 0.5 else 1
        path = folder / f"{number}_{mode.replace(';', '')}_{wide}x{high}_{turned}.{form.lower()}"
        path.write_bytes(picture(wide, high, seed=number, form=form, mode=mode, turned=turned))
        drawn.append(
            Drawn(path, draw.choice(("What is this?", " Zwei  Räume\n", "図 <b>3</b>", "x" * draw.randint(1, 40))))
        )
    return drawn


@pytest.fixture(scope="session")
def ask(vllm_env: Path) -> Ask:
    def run(what: str, *arguments: str, **request: Any) -> Any:
        return answer_of(vllm_env, [THIRD_PARTY, what, *arguments], request)

    return run


@pytest.fixture(scope="session")
def mlx_vlm() -> Path:
    """The wheel of mlx-vlm, from the package index or from an earlier run."""
    folder = cache_dir() / "processors"
    wheel = folder / f"mlx_vlm-{MLX_VLM}-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"mlx-vlm=={MLX_VLM}"], capture_output=True, text=True, check=False
        )
        if done.returncode or not wheel.is_file():
            pytest.skip(f"not run: mlx-vlm {MLX_VLM} cannot be had from the package index")
    return wheel


def folder_of(name: str) -> Path:
    return Path(run_tool_or_skip("engines.unknown_families", name)) if name in STAND_INS else model_folder(name)


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
    return PromptImage(bytes(32), family.count(size.width, size.height), (size.width, size.height))


def chats(pictures: list[Drawn]) -> list[list[Drawn]]:
    lengths, groups = (1, 2, 3), []
    while pictures:
        length = lengths[len(groups) % 3]
        groups.append(pictures[:length])
        pictures = pictures[length:]
    return groups


def selected(request: pytest.FixtureRequest, names: Sequence[str]) -> list[str]:
    """Return the names that the run has tests of: it may be one of a few families."""
    return [name for name in names if any(item.name.endswith(f"[{name}]") for item in request.session.items)]


@pytest.fixture(scope="module")
def hugging_face(
    ask: Ask, sizes: list[tuple[int, int]], pictures: list[Drawn], request: pytest.FixtureRequest
) -> dict[str, Any]:
    """The answers for all folders of the run, of one process: it takes longer to start than to answer."""
    asked = [{"files": [str(drawn.path) for drawn in group], "text": group[0].text} for group in chats(pictures)]
    folders = [str(folder_of(name)) for name in selected(request, HUGGING_FACE)]
    answers = ask("hugging_face", models=folders, sizes=sizes, chats=asked)
    return {Path(folder).name: answer for folder, answer in answers.items()}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_case_24_counts_of_drawn_sizes_are_those_of_the_hugging_face_processor(
    name: str, hugging_face: dict[str, Any], sizes: list[tuple[int, int]], record: Record
) -> None:
    theirs = hugging_face[name]["counts"]
    wrong = different(sizes, list(counted(load(folder_of(name)), sizes)), theirs)
    record(f"processor {name}: sizes, refused, mismatches", [len(sizes), theirs.count(None), len(wrong)])
    assert not wrong, wrong[:10]


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_case_24_prompts_with_drawn_pictures_are_those_of_the_hugging_face_processor(
    name: str, hugging_face: dict[str, Any], pictures: list[Drawn], record: Record
) -> None:
    family = load(folder_of(name))
    prompter = Prompter.load(folder_of(name), family=family)
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
def own_counts(ask: Ask, sizes: list[tuple[int, int]]) -> dict[str, list[int | None]]:
    answers = ask("vllm_counts", models=[str(folder_of(name)) for name in VLLM_ALONE], sizes=sizes)
    return {Path(folder).name: counts for folder, counts in answers.items()}


@pytest.mark.parametrize("name", VLLM_ALONE)
def test_case_24_counts_of_drawn_sizes_are_those_of_vllms_own_processor(
    name: str, own_counts: dict[str, list[int]], sizes: list[tuple[int, int]], record: Record
) -> None:
    wrong = different(sizes, list(counted(load(folder_of(name)), sizes)), own_counts[name])
    record(f"vLLM's processor {name}: sizes, mismatches", [len(sizes), len(wrong)])
    assert not wrong, wrong[:10]


@pytest.fixture(scope="module")
def front_end(ask: Ask, pictures: list[Drawn], request: pytest.FixtureRequest) -> dict[str, Prompts]:
    """The prompts of all families of the run by vLLM's own front end, of one process."""
    names = selected(request, PROCESSED)
    asked = [
        {"files": [str(drawn.path) for drawn in group], "text": group[0].text}
        for group in chats(pictures[:OWN_PICTURES])
    ]
    answers = ask("vllm_prompts", models=[str(folder_of(name)) for name in names], chats=asked)
    return {name: Prompts(answer) for name, answer in zip(names, answers, strict=True)}


@pytest.mark.adopts(engine="vllm", check="front end")
@pytest.mark.proves("vllm", "front end", "{name}")
@pytest.mark.parametrize("name", PROCESSED)
def test_case_24_images_have_the_tokens_and_places_that_vllms_own_front_end_gives_them(
    name: str, front_end: dict[str, Prompts], pictures: list[Drawn], record: Record, figure: Figure
) -> None:
    family = load(folder_of(name))
    prompter = Prompter.load(folder_of(name), family=family)
    groups = chats(pictures[:OWN_PICTURES])
    wrong = []
    for group, answer in zip(groups, front_end[name].listed(), strict=True):
        content = [*({"type": "image_url"} for _ in group), {"type": "text", "text": group[0].text}]
        shown = [replace(image(family, drawn), identity=bytes([n]) * 32) for n, drawn in enumerate(group)]
        expanded = prompter.prompt({"messages": [{"role": "user", "content": content}]}, shown)
        places = [[span.offset, span.length, span.identity[0]] for span in expanded.spans]
        if (expanded.ids.tolist(), places) != (answer["ids"], answer["places"]):
            wrong.append([drawn.path.name for drawn in group])
    figures = {"pictures": OWN_PICTURES, "prompts": len(groups), "mismatches": len(wrong)}
    record(f"vLLM's front end {name}", figures)
    for what, count in figures.items():
        figure(what, count)
    assert not wrong, wrong[:10]


@pytest.fixture(scope="module")
def mlx(ask: Ask, mlx_vlm: Path, sizes: list[tuple[int, int]], pictures: list[Drawn]) -> Any:
    files = [str(drawn.path) for drawn in pictures]
    return ask("mlx_phi3v", str(mlx_vlm), crops=CROPS, sizes=sizes, pictures=files, picture_crops=PICTURE_CROPS)


@pytest.mark.parametrize("crops", CROPS)
def test_case_24_phi3_counts_of_drawn_sizes_are_those_of_mlx_vlm(
    crops: int, mlx: Any, sizes: list[tuple[int, int]], record: Record
) -> None:
    theirs = mlx["counts"][str(crops)]
    wrong = different(sizes, list(counted(load(model_folder(PHI3), num_crops=crops), sizes)), theirs)
    record(f"processor {PHI3}, {crops} crops: sizes, refused, mismatches", [len(sizes), theirs.count(None), len(wrong)])
    assert not wrong, wrong[:10]


def test_case_24_phi3_tiles_and_tokens_of_drawn_pictures_are_those_of_mlx_vlm(
    mlx: Any, pictures: list[Drawn], record: Record
) -> None:
    family = load(model_folder(PHI3), num_crops=PICTURE_CROPS)
    wrong = [
        drawn.path.name
        for drawn, theirs in zip(pictures, mlx["pictures"], strict=True)
        if image(family, drawn).count != theirs["tokens"] or not 1 <= theirs["tiles"] <= PICTURE_CROPS
    ]
    record(f"processor {PHI3}: pictures, mismatches", [len(pictures), len(wrong)])
    assert not wrong, wrong[:10]


PROMPTS = 3000
WORDS = [
    *("a", " the", "naïve ", "図", "  ", "\n", "\t", "\u2581", " \u2581x", "é", "🎉", "<", "<|", "|>", "_1", "1", "<s"),
    *("s>", "<s>", "</s>", "<unk>", "<|endoftext|>", "<|system|>", "<|user|>\n", "<|end|>\n", "<|assistant|>\n"),
    *("<|image|>", "<s> ", "</s>  ", "<|end|> ", "<|user|> x", "<|placeholder3|> y", "<|image|> z", "<|image"),
    *("<|image_", "image_1|>", "<|image_01|>", "<|image_0|>", "<|image_|>", "<|image_\u0661|>", "<| image_1|>"),
    "<|image_12|>",
]


def prompts() -> list[dict[str, Any]]:
    draw = random.Random(3)
    drawn = []
    for _ in range(PROMPTS):
        images = draw.choice((0, 1, 1, 1, 2, 2, 3))
        tags = [f"<|image_{number + 1}|>" for number in range(images)]
        if draw.random() < 0.3:
            tags += draw.choices(["<|image_1|>", "<|image_2|>", "<|image_3|>", "<|image_4|>"], k=draw.randint(1, 2))
        if draw.random() < 0.1:
            draw.shuffle(tags)
        pieces = ["".join(draw.choices(WORDS, k=draw.randint(0, 6))) for _ in range(len(tags) + 1)]
        text = pieces[0] + "".join(tag + piece for tag, piece in zip(tags, pieces[1:], strict=True))
        drawn.append({"text": text, "counts": [draw.randint(1, 9) for _ in range(images)]})
    return drawn


def test_case_34_phi3_prompts_of_drawn_text_are_those_of_vllms_own_class(ask: Ask, record: Record) -> None:
    folder = model_folder(PHI3)
    family = families.load_family(folder, None)
    assert family is not None
    prompter, drawn = Prompter.load(folder, family=family), prompts()
    equal, refused, wrong = 0, 0, []
    for prompt, theirs in zip(drawn, ask("vllm_phi3v", str(folder), prompts=drawn), strict=True):
        images = [PromptImage(number.to_bytes(32), count) for number, count in enumerate(prompt["counts"])]
        in_order = theirs is not None and [place[2] for place in theirs["places"]] == list(range(len(images)))
        try:
            expanded = prompter.expand(prompt["text"], images)
        except PlaceholderError:
            refused += 1
            if in_order:
                wrong.append(prompt)
            continue
        places = [[span.offset, span.length, int.from_bytes(span.identity)] for span in expanded.spans]
        if in_order and expanded.ids == array("I", theirs["ids"]) and places == theirs["places"]:
            equal += 1
        else:
            wrong.append(prompt)
    record("vLLM's Phi-3 class: prompts equal, refused, mismatches", [equal, refused, len(wrong)])
    assert not wrong, wrong[:5]
    assert equal > PROMPTS * 0.8
    assert refused > 20


@pytest.mark.parametrize("release", parameters(["vllm_env", "newer_vllm_env"], "vllm_env"))
def test_handed_over_images_of_every_family_are_what_the_engine_would_have_made_of_them(
    release: str, request: pytest.FixtureRequest, shrunk: Shrunk, tmp_path: Path, record: Record
) -> None:
    """Of every release that the plugin supports."""
    env: Path = request.getfixturevalue(release)
    install(tmp_path / "plugin")
    files = []
    for number, (wide, high) in enumerate(((224, 224), (336, 672), (1000, 700))):
        files.append(tmp_path / f"{number}.png")
        files[-1].write_bytes(picture(wide, high, seed=number))
    folders = {family: str(shrunk(repository)) for family, repository in REPOSITORIES.items()}
    asked = {"models": list(folders.values()), "pictures": list(map(str, files))}
    answers = answer_of(env, [THIRD_PARTY, "vllm_handover", tmp_path / "plugin"], asked)
    for family, folder in folders.items():
        answer = answers[folder]
        assert (answer["differences"], answer["again"], answer["changed"]) == ([], [], True), family
        fields = ", ".join(f"{name} ({kind})" for name, kind in answer["fields"])
        record(f"{release}, handed over {family}: 3 images", f"{answer['bytes']} bytes: {fields}")
