"""Record short captures from a real vLLM on CPU, which unit tests compare with the library: requests, answers, frames.

    .venv/bin/python -m hack.engines.record_capture ENGINE_ENV OUT_DIR [CAPTURE ...]

Run it from the repository's root: the engine is given the model by its relative path, which is part of the names that
it makes of images. Writes ``OUT_DIR/CAPTURE.jsonl`` for each capture (``tiny-qwen2-vl``, and ``tiny-qwen2-vl-window``,
whose model has a sliding window of 1,024 tokens), and the pictures in ``OUT_DIR/images``.
"""

import copy
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from conformance import engine_process

from mmrouter_cli.sample_images import data_uri
from mmrouter_lib.media_identity import media_identity, to_wire

MODEL = Path("examples/models/tiny-qwen2-vl")
WINDOWED = f"{MODEL.name}-window"
WINDOW, STEP = 1024, 512  # tokens
WORDS = "the lamp on north pier was repainted twice and keeper wrote down every boat that passed it by night"
KEY = bytes(range(32))
PICTURES = {"a_112x84.png": (1, 112, 84), "b_112x84.png": (2, 112, 84), "c_196x140.png": (3, 196, 140)}
SETTLE_SECONDS = 1.0


def main() -> int:
    env, out = Path(sys.argv[1]), Path(sys.argv[2])
    images = out / "images"
    images.mkdir(parents=True, exist_ok=True)
    for name, (seed, width, height) in PICTURES.items():
        cells = Image.frombytes("RGB", (4, 4), random.Random(seed).randbytes(48))
        cells.resize((width, height), Image.Resampling.NEAREST).save(images / name, optimize=True)
    wanted = sys.argv[3:] or [MODEL.name, WINDOWED]
    if MODEL.name in wanted:
        record(env, out, MODEL.name, MODEL, list(cases(images)), "")
    if WINDOWED in wanted:
        with tempfile.TemporaryDirectory() as made:
            model = narrowed(Path(made) / MODEL.name)
            note = f", sliding window of {WINDOW} tokens, steps of {STEP}"
            record(env, out, WINDOWED, model, list(windowed(images)), note, f"--max-num-batched-tokens={STEP}")
    return 0


def record(
    env: Path, out: Path, name: str, model: Path, made: list[tuple[str, dict[str, Any]]], note: str, *flags: str
) -> None:
    rows: list[dict[str, Any]] = []
    images = out / "images"
    with engine_process.engine(env, model, out / "engine.log", *flags) as engine:
        for number, (label, body) in enumerate(made):
            seen = len(engine.listener.frames)
            sent = inlined(body, images)
            began = time.monotonic()
            answer = engine.post(sent)
            seconds = time.monotonic() - began
            # What a request stored is published right after its last step; nothing says that there is no more.
            time.sleep(SETTLE_SECONDS)
            said = answer.json()
            reply = {
                "prompt_token_ids": said.get("prompt_token_ids"),
                "output_token_ids": (said.get("choices") or [{}])[0].get("token_ids"),
                "usage": said.get("usage"),
            }
            frames = engine.listener.frames[seen:]
            rows.append(
                {
                    "kind": "step",
                    "n": number,
                    "label": label,
                    "request": {"method": "POST", "path": "/v1/chat/completions", "body": body},
                    "status": answer.status_code,
                    "seconds": round(seconds, 3),
                    "reply": reply,
                    "frames": [{"seq": n.to_bytes(8, "big").hex(), "payload": payload.hex()} for n, payload in frames],
                }
            )
        replayed = [
            ["", "", number.to_bytes(8, "big").hex(), payload.hex()] for number, payload in engine.listener.replayed()
        ]
    meta = {
        "kind": "meta",
        "model": MODEL.name,
        "model_id": str(MODEL),
        "note": f"vLLM 0.32.0 CPU, block 32, sha256_cbor, no weights, float32{note}",
    }
    replay = [{"kind": "replay", "start": 0, "parts": replayed}] if name == MODEL.name else []
    lines = [json.dumps(line, separators=(",", ":")) for line in (meta, *rows, *replay)]
    (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (out / "engine.log").unlink()


def narrowed(out: Path) -> Path:
    """Copy the model with a sliding window for every layer."""
    shutil.copytree(MODEL, out)
    config = json.loads((out / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0}
    (out / "config.json").write_text(json.dumps(config))
    return out


def cases(images: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    words = "The lamp on the north pier was repainted twice and the keeper wrote down every boat that passed it. "
    tail = "Say in one line what changed between the first and the second evening by the water."
    uuid = to_wire(media_identity((images / "a_112x84.png").read_bytes(), {}, key=KEY))
    a, b, c = (picture(name) for name in PICTURES)
    yield "text", chat(words)
    yield "text again", chat(words)
    yield "text, answer fills blocks", {**chat(tail), "max_tokens": 40}
    yield "an image by its file", chat(words, a, tail)
    yield "an image by our identity", chat(words, {**a, "uuid": uuid}, tail)
    yield "two images", chat(words, a, b, tail)
    yield "two images swapped", chat(words, b, a, tail)
    yield "a larger image first", chat(c, words)
    yield "cache_salt", {**chat(words, a, tail), "cache_salt": "tenant-1"}


def windowed(images: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield prompts around a window: longer than it, cut back, and with images inside and before it."""
    draw = random.Random(WINDOW)
    lines = [" ".join(draw.choices(WORDS.split(), k=75)) for _ in range(12)]
    pictures = {name: media_identity((images / name).read_bytes(), {}, key=KEY) for name in PICTURES}
    a, b, c = ({**picture(name), "uuid": to_wire(identity)} for name, identity in pictures.items())
    yield "text within the window", chat(*lines[:2])
    yield "text beyond the window", chat(*lines)
    yield "text beyond the window again", chat(*lines)
    yield "text beyond the window, longer", chat(*lines, lines[0], lines[1])
    yield "text beyond the window, cut back", chat(*lines[:7])
    yield "text beyond the window, cut back again", chat(*lines[:7])
    yield "image inside the window", chat(*lines[4:9], a, *lines[9:])
    yield "image inside the window again", chat(*lines[4:9], a, *lines[9:])
    yield "image before the window", chat(b, *lines[:11])
    yield "image before the window again", chat(b, *lines[:11])
    yield "image before the window, other tail", chat(b, *lines[:10], lines[3])
    yield "images before and inside the window", chat(b, *lines[:9], c, lines[2])


def chat(*parts: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"model": MODEL.name, "messages": [{"role": "user", "content": content}], "max_tokens": 2}


def picture(name: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": {"$image": name, "via": "data"}}}


def inlined(body: dict[str, Any], images: Path) -> dict[str, Any]:
    sent = copy.deepcopy(body)
    for message in sent["messages"]:
        for part in message["content"]:
            if part["type"] == "image_url":
                part["image_url"]["url"] = data_uri((images / part["image_url"]["url"]["$image"]).read_bytes())
    return sent


if __name__ == "__main__":
    sys.exit(main())
