"""Recorded frames of real vLLM engines, and the requests that caused them."""

import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from mmrouter_lib.block_keys import Span
from mmrouter_lib.media_identity import foreign_identity, from_wire

REPOSITORY = Path(__file__).parents[3]
PLACEHOLDER = {"qwen": 151655, "llava": 32000, "phi3v": 32044}
TINY_PLACEHOLDER = 364  # of the small vocabulary that the other captures were made with


@dataclass(frozen=True)
class Step:
    """One answered request: expanded ids with the generated ones, spans with identities, and the frames it caused."""

    label: str
    ids: "array[int]"
    spans: tuple[Span, ...]
    lora: str | None
    salt: str | None
    payloads: tuple[bytes, ...]
    prompt: int  # tokens before the generated ones
    cached: int | None  # tokens that the engine says it had
    exact: bool  # false with per-request processor options, which change identifiers in ways that are not modelled


class Captures:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / name).read_text().splitlines()]

    def names(self) -> list[str]:
        return sorted(path.name for path in self.folder.glob("*.jsonl"))

    def frames(self, name: str) -> Iterator[tuple[int, bytes]]:
        """Live frames of a file as (sequence number, payload), in order."""
        for line in self.lines(name):
            for frame in line.get("frames", []):
                yield int(frame["seq"], 16), bytes.fromhex(frame["payload"])

    def replays(self, name: str) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """Replays as (first number asked for, [(sequence number, payload)]) without the end marker."""
        for line in self.lines(name):
            if line.get("kind") == "replay":
                yield line["start"], [(int(p[2], 16), bytes.fromhex(p[3])) for p in line["parts"] if p[3]]

    def steps(self, name: str) -> Iterator[Step]:
        lines = self.lines(name)
        pad = _placeholder(name)
        for line in lines:
            reply = line.get("reply") or {}
            if line.get("kind") != "step" or line["status"] != 200 or "prompt_token_ids" not in reply:
                continue
            body = line["request"]["body"]
            prompt = reply["prompt_token_ids"]
            images = self.folder / "images"
            if any(not (images / image).exists() for image in _files(body)):
                continue
            names = list(_identifiers(body, images, f"models/{lines[0]['model']}"))
            places = _runs(prompt, pad)
            assert len(places) == len(names), line["label"]
            spans = tuple(
                Span(offset, length, from_wire(name) or foreign_identity(name))
                for (offset, length), name in zip(places, names, strict=True)
            )
            ids = array("I", prompt + (reply.get("output_token_ids") or []))
            lora = body["model"] if body["model"] != lines[0]["model"] else None
            payloads = tuple(bytes.fromhex(frame["payload"]) for frame in line["frames"])
            kwargs = {"mm_processor_kwargs", "media_io_kwargs"} & set(body)
            details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
            yield Step(
                label=line["label"],
                ids=ids,
                spans=spans,
                lora=lora,
                salt=body.get("cache_salt"),
                payloads=payloads,
                prompt=len(prompt),
                cached=details.get("cached_tokens"),
                exact=not kwargs,
            )


def _placeholder(name: str) -> int:
    if "real" not in name and "phi3v" not in name:
        return TINY_PLACEHOLDER
    return next(token for prefix, token in PLACEHOLDER.items() if name.startswith(prefix))


def _image_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                yield part


def _files(body: dict[str, Any]) -> Iterator[str]:
    for part in _image_parts(body):
        if part["image_url"] is not None:
            yield part["image_url"]["url"]["$image"]


def _identifiers(body: dict[str, Any], images: Path, model: str) -> Iterator[str]:
    """The identifier of every image of a request: its uuid, else vLLM's default hash.

    See docs/engine-facts/vllm.md#default-image-hash.
    """
    for part in _image_parts(body):
        yield part.get("uuid") or _default_hash((images / part["image_url"]["url"]["$image"]).read_bytes(), model)


def _default_hash(raw: bytes, model: str) -> str:
    hasher = blake3()
    for name, value in ((b"image", [b"image", raw]), (b"model_id", [model.encode()])):
        hasher.update(_frame(name))
        for item in value:
            hasher.update(b"\x03" + _frame(item))
    return hasher.hexdigest()


def _frame(raw: bytes) -> bytes:
    return len(raw).to_bytes(8, "little") + raw


def _runs(ids: list[int], pad: int) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for place, token in enumerate(ids):
        if token == pad and place and ids[place - 1] == pad:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        elif token == pad:
            runs.append((place, 1))
    return runs


@pytest.fixture(scope="session")
def captures() -> Captures:
    folder = Path(os.environ.get("MMROUTER_CAPTURES", REPOSITORY.parent / "shared" / "captures")) / "vllm"
    if not folder.is_dir():
        pytest.skip(f"not run: no captures at {folder} (MMROUTER_CAPTURES)")
    return Captures(folder)
