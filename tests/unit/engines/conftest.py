"""Recorded frames of real engines and the requests that caused them; a short one of each engine is beside this file."""

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pytest
from unit.conftest import shared_folder
from unit.engines.image_names import default_identifier

from mmrouter_lib.api import parse_deployment
from mmrouter_lib.block_keys import Span
from mmrouter_lib.media_identity import foreign_identity, from_wire

PLACEHOLDER = {"qwen": 151655, "llava": 32000, "phi3v": 32044}
DATA = Path(__file__).parent / "data"
OWN, WINDOWED = "tiny-qwen2-vl.jsonl", "tiny-qwen2-vl-window.jsonl"
"""The captures of this repository, which `hack/engines/record_capture.py` recorded; the others are in ``../shared``."""
OWN_PLACEHOLDER = 1029
TINY_PLACEHOLDER = 364  # of the small vocabulary that the other captures were made with


def document(pool: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    """The shortest useful resource, as decoded YAML, with spec sections and fields of its pool replaced."""
    worker = {"name": "worker", "role": "worker", "accelerator": {"kind": "nvidia"}} | (pool or {})
    spec = {"model": {"id": "org/model"}, "engine": {"type": "vllm"}, "pools": [worker]} | spec
    kind = {"apiVersion": "mmrouter.io/v1alpha1", "kind": "MMRouterDeployment"}
    return {**kind, "metadata": {"name": "vl"}, "spec": spec}


def deployment(pool: dict[str, Any] | None = None, *, engine: Any, **spec: Any) -> Any:
    """The shortest resource with an engine's type or fields."""
    return parse_deployment(document(pool, engine=engine if isinstance(engine, dict) else {"type": engine}, **spec))


def value(args: list[str], flag: str) -> str:
    """The value of a flag that is there once."""
    assert args.count(flag) == 1
    return args[args.index(flag) + 1]


def values(args: list[str], flags: str) -> list[str]:
    """The values of flags, separated by blanks, that are there once."""
    return [value(args, flag) for flag in flags.split()]


def stored(**changes: Any) -> dict[str, Any]:
    """vLLM's event of two blocks."""
    fields = {"block_hashes": [11, 12], "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "block_size": 2}
    return {"type": "BlockStored", **fields, "lora_id": None, "medium": "GPU", "lora_name": None} | changes


def batch(*events: Any, rank: int = 0) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), rank])


def role(name: str, kind: str = "nvidia", **fields: Any) -> dict[str, Any]:
    """A pool that is named after its role."""
    return {"name": name, "role": name, "accelerator": {"kind": kind}} | fields


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


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class Captures:
    """What was recorded of vLLM."""

    @cached_property
    def folder(self) -> Path:
        return shared_folder("MMROUTER_CAPTURES", "captures/vllm")

    def folder_of(self, name: str) -> Path:
        return DATA / "vllm" if name in (OWN, WINDOWED) else self.folder

    def lines(self, name: str) -> list[dict[str, Any]]:
        return json_lines(self.folder_of(name) / name)

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
            images = self.folder_of(name) / "images"
            files = [part["image_url"]["url"]["$image"] for part in image_parts(body) if part["image_url"]]
            if not all((images / file).exists() for file in files):
                continue
            model, names = lines[0].get("model_id") or f"models/{lines[0]['model']}", []
            options = {"processor_options": body.get("mm_processor_kwargs")}
            options["media_options"] = body.get("media_io_kwargs")
            for part in image_parts(body):
                file = (part.get("image_url") or {}).get("url", {}).get("$image")
                raw = (images / file).read_bytes() if file else None
                names.append(default_identifier(raw, model=model, uuid=part.get("uuid"), **options))
            places = _runs(prompt, pad)
            assert len(places) == len(names), line["label"]
            spans = tuple(
                Span(offset, length, from_wire(name) or foreign_identity(name))
                for (offset, length), name in zip(places, names, strict=True)
            )
            ids = array("I", prompt + (reply.get("output_token_ids") or []))
            lora = body["model"] if body["model"] != lines[0]["model"] else None
            payloads = tuple(bytes.fromhex(frame["payload"]) for frame in line["frames"])
            details = (reply.get("usage") or {}).get("prompt_tokens_details") or {}
            label, salt, cached = line["label"], body.get("cache_salt"), details.get("cached_tokens")
            yield Step(label, ids, spans, lora, salt, payloads, len(prompt), cached)


def _placeholder(name: str) -> int:
    if name in (OWN, WINDOWED):
        return OWN_PLACEHOLDER
    if "real" not in name and "phi3v" not in name:
        return TINY_PLACEHOLDER
    return next(token for prefix, token in PLACEHOLDER.items() if name.startswith(prefix))


def image_parts(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for message in body["messages"]:
        for part in message["content"] if isinstance(message["content"], list) else []:
            if part["type"] == "image_url":
                yield part


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
    return Captures()


EXCERPT = DATA / "sglang.jsonl"
SGLANG_PLACEHOLDER = 403  # of the small vocabulary that the captures were made with


def rows(family: str | None = None) -> list[dict[str, Any]]:
    """The excerpt: family, page_size, case, request, and the payloads that it caused."""
    return [row for row in json_lines(EXCERPT) if family in (None, row["family"])]


def row(family: str, case: str) -> dict[str, Any]:
    return next(row for row in rows(family) if row["case"] == case)


def events(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The engine's events of one row as on the wire."""
    return [event for payload in row["payloads"] for event in msgspec.msgpack.decode(bytes.fromhex(payload))[1]]


def sglang_captures() -> Path:
    return shared_folder("MMROUTER_CAPTURES", "captures/sglang")


def capture_rows(name: str) -> list[dict[str, Any]]:
    return json_lines(sglang_captures() / name)
