"""Prompters for the tiny model, the real models and the captures of a real vLLM."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mmrouter_lib import families
from mmrouter_lib.families import Family
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import Prompter, PromptImage

REPOSITORY = Path(__file__).parents[3]
TINY = REPOSITORY / "examples" / "models" / "tiny-qwen2-vl"


def load(folder: Path, **options: Any) -> Prompter:
    family = families.load_family(folder, None)
    assert family is not None
    return Prompter.load(folder, family=family, **options)


def from_environment(name: str, default: str) -> Path:
    folder = Path(os.environ.get(name, REPOSITORY.parent / "shared" / default))
    if not folder.is_dir():
        pytest.skip(f"not run: no {default} folder at {folder} ({name})")
    return folder


@pytest.fixture(scope="session")
def load_prompter() -> Callable[..., Prompter]:
    return load


@pytest.fixture(scope="session")
def tiny_folder() -> Path:
    return TINY


@pytest.fixture(scope="session")
def tiny() -> Prompter:
    return load(TINY)


@pytest.fixture(scope="session")
def models() -> Path:
    return from_environment("MMROUTER_MODELS", "models")


@pytest.fixture(scope="session")
def qwen2(models: Path) -> Prompter:
    return load(models / "Qwen--Qwen2-VL-2B-Instruct")


@pytest.fixture(scope="session")
def qwen3(models: Path) -> Prompter:
    return load(models / "Qwen--Qwen3-VL-2B-Instruct")


@pytest.fixture(scope="session")
def llava(models: Path) -> Prompter:
    return load(models / "llava-hf--llava-1.5-7b-hf")


@pytest.fixture(scope="session")
def llavanext(models: Path) -> Prompter:
    return load(models / "llava-hf--llava-v1.6-mistral-7b-hf")


@pytest.fixture(scope="session")
def phi3(models: Path) -> Prompter:
    return load(models / "microsoft--Phi-3-vision-128k-instruct")


@dataclass(frozen=True)
class Step:
    """A chat request that a real vLLM answered: its body, images, the engine's own ids and the blocks it stored."""

    label: str
    body: dict[str, Any]
    images: tuple[PromptImage, ...]
    prompt: list[int]
    output: list[int]
    events: tuple[dict[str, Any], ...]


@dataclass(frozen=True)
class Render:
    """Messages that a real vLLM rendered: its ids, and offset and length of each image."""

    label: str
    messages: list[dict[str, Any]]
    images: tuple[PromptImage, ...]
    prompt: list[int]
    places: list[tuple[int, int]]


_THIN = re.compile(r"thin_(\d+)x(\d+)\.png")
"""Pictures that the captures name and do not hold: very thin ones of one colour."""


class Captures:
    """The recorded requests of ``../shared/captures/vllm``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def steps(self, name: str, model: Path) -> Iterator[Step]:
        """Answered chats of a file; the counts of their images come from ``model``'s family and the image files."""
        by_uuid: dict[str, str] = {}
        for line in map(json.loads, (self.folder / name).read_text().splitlines()):
            request, reply = line.get("request", {}), line.get("reply") or {}
            events = tuple(event for frame in line.get("frames", ()) for event in frame["decoded"][1])
            if request.get("path") != "/v1/chat/completions" or "prompt_token_ids" not in reply:
                yield Step(line.get("label", ""), {}, (), [], [], events)
                continue
            body = request["body"]
            options = {"min_pixels": None, "max_pixels": None, "num_crops": None, **body.get("mm_processor_kwargs", {})}
            family = families.load_family(model, SimpleNamespace(**options))
            files = list(_files(body, by_uuid))
            yield Step(
                line["label"],
                body,
                tuple(self._image(family, number, file) for number, file in enumerate(files)),
                reply["prompt_token_ids"],
                reply.get("output_token_ids") or [],
                events,
            )

    def renders(self, name: str, model: Path) -> Iterator[Render]:
        """Rendered chats of a file that the engine placed."""
        family = families.load_family(model, None)
        assert family is not None
        for line in map(json.loads, (self.folder / name).read_text().splitlines()):
            if line["kind"] == "render":
                files = _files({"messages": line["messages"]}, {})
                images = tuple(self._image(family, number, file) for number, file in enumerate(files))
                placed = (line["mm_placeholders"] or {}).get("image", [])
                places = [(place["offset"], place["length"]) for place in placed]
                yield Render(line["label"], line["messages"], images, line["token_ids"], places)

    def _image(self, family: Family, number: int, file: str) -> PromptImage:
        path = self.folder / "images" / file
        if thin := _THIN.fullmatch(file):
            width, height = int(thin[1]), int(thin[2])
        else:
            size = probe(path.read_bytes(), max_pixels=10**8, exif=family.rotates_exif)
            width, height = size.width, size.height
        return PromptImage(number.to_bytes(32, "big"), family.count(width, height))


@pytest.fixture(scope="session")
def captures() -> Captures:
    return Captures(from_environment("MMROUTER_CAPTURES", "captures") / "vllm")


@pytest.fixture(scope="session")
def captured_model(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The folder with 365 tokens that most captures were made with; its script lies beside the models."""
    script = models.parent / "tools" / "vllm" / "build_tiny.py"
    if not script.is_file():
        pytest.skip(f"not run: no {script.name} beside the models")
    out = tmp_path_factory.mktemp("captured")
    subprocess.run([sys.executable, str(script), str(out), "qwen2vl"], check=True, capture_output=True)
    return out / "qwen2vl"


def _files(body: dict[str, Any], by_uuid: dict[str, str]) -> Iterator[str]:
    """The image files of a body, in order; an image given by uuid alone is the one that came with that uuid before."""
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else ():
            if part["type"] == "image_url":
                uuid = part.get("uuid")
                file = part["image_url"]["url"]["$image"] if part["image_url"] else by_uuid[uuid]
                if uuid:
                    by_uuid.setdefault(uuid, file)
                yield file
