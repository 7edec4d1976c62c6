"""Prompters for the tiny model, the real models and the captures of a real vLLM."""

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from unit.conftest import shared_folder
from unit.engines.conftest import Captures, image_parts

from mmrouter_lib import families
from mmrouter_lib.families import Family
from mmrouter_lib.image_size import probe
from mmrouter_lib.prompt import Prompter, PromptImage

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-qwen2-vl"


def load(folder: Path, **options: Any) -> Prompter:
    family = families.load_family(folder, None)
    assert family is not None
    return Prompter.load(folder, family=family, **options)


@pytest.fixture(scope="session")
def tiny() -> Prompter:
    return load(TINY)


@pytest.fixture(scope="session")
def models() -> Path:
    return shared_folder("MMROUTER_MODELS", "models")


def real(folder: str) -> Any:
    """Return a fixture: the prompter of a real model's folder."""

    @pytest.fixture(scope="session")
    def prompter(models: Path) -> Prompter:
        return load(models / folder)

    return prompter


MODELS = {  # fixture -> folder
    "qwen2": "Qwen--Qwen2-VL-2B-Instruct",
    "qwen3": "Qwen--Qwen3-VL-2B-Instruct",
    "llava": "llava-hf--llava-1.5-7b-hf",
    "llavanext": "llava-hf--llava-v1.6-mistral-7b-hf",
    "phi3": "microsoft--Phi-3-vision-128k-instruct",
}
qwen2, qwen3, llava, llavanext, phi3 = map(real, MODELS.values())


def image(number: int, count: int) -> PromptImage:
    return PromptImage(number.to_bytes(32, "big"), count)


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


class Chats(Captures):
    """The recorded requests."""

    def steps(self, name: str, model: Path) -> Iterator[Step]:
        """Answered chats of a file; the counts of their images come from ``model``'s family and the image files."""
        by_uuid: dict[str, str] = {}
        for line in self.lines(name):
            request, reply = line.get("request", {}), line.get("reply") or {}
            payloads = (bytes.fromhex(frame["payload"]) for frame in line.get("frames", ()))
            events = tuple(event for payload in payloads for event in msgspec.msgpack.decode(payload)[1])
            if request.get("path") != "/v1/chat/completions" or "prompt_token_ids" not in reply:
                yield Step(line.get("label", ""), {}, (), [], [], events)
                continue
            body = request["body"]
            options = {"min_pixels": None, "max_pixels": None, "num_crops": None, **body.get("mm_processor_kwargs", {})}
            family = families.load_family(model, SimpleNamespace(**options))
            assert family is not None
            images = self._images(family, body, self.folder_of(name), by_uuid)
            output = reply.get("output_token_ids") or []
            yield Step(line["label"], body, images, reply["prompt_token_ids"], output, events)

    def renders(self, name: str, model: Path) -> Iterator[Render]:
        """Rendered chats of a file that the engine placed."""
        for line in self.lines(name):
            if line["kind"] == "render":
                images = self._images(families.load_family(model, None), line, self.folder, {})
                placed = (line["mm_placeholders"] or {}).get("image", [])
                places = [(place["offset"], place["length"]) for place in placed]
                yield Render(line["label"], line["messages"], images, line["token_ids"], places)

    def _images(
        self, family: Family, body: dict[str, Any], folder: Path, by_uuid: dict[str, str]
    ) -> tuple[PromptImage, ...]:
        """The images of a body, in order; one given by uuid alone is the one that came with that uuid before."""
        images = []
        for part in image_parts(body):
            uuid = part.get("uuid")
            file = part["image_url"]["url"]["$image"] if part["image_url"] else by_uuid[uuid]
            if uuid:
                by_uuid.setdefault(uuid, file)
            if thin := _THIN.fullmatch(file):
                width, height = int(thin[1]), int(thin[2])
            else:
                data = (folder / "images" / file).read_bytes()
                size = probe(data, max_pixels=10**8, exif=family.rotates_exif)
                width, height = size.width, size.height
            images.append(image(len(images), family.count(width, height)))
        return tuple(images)


@pytest.fixture(scope="session")
def captures() -> Chats:
    return Chats()


@pytest.fixture(scope="session")
def captured_model(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    """The folder with 365 tokens that most captures were made with; its script lies beside the models."""
    script = models.parent / "tools" / "vllm" / "build_tiny.py"
    if not script.is_file():
        pytest.skip(f"not run: no {script.name} beside the models")
    out = tmp_path_factory.mktemp("captured")
    subprocess.run([sys.executable, str(script), str(out), "qwen2vl"], check=True, capture_output=True)
    return out / "qwen2vl"
