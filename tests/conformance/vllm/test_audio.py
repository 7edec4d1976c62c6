"""Drawn conversations with audio through the router's stages and vLLM's own front end, without an engine.

What is predicted is compared: ids, images and audio, and the extra keys of every block. That is the whole prompt where
the router tells the tokens of every recording, else what stands before the first one of which it does not.
"""

import base64
import io
import random
import wave
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure
from conformance.rendering import own_prompts
from conformance.setups import AUDIO
from conformance.videos import pyav_folder
from conformance.vllm.test_fields import Router
from conformance.workload import image_part, picture, text_part
from long_form import IS_LONG

from mmrouter_lib.block_keys import block_extras, span_extra
from mmrouter_lib.media_identity import to_wire
from mmrouter_router.request.prepared import Prepared

CHATS = 200 if IS_LONG else 40
FAMILIES = list(AUDIO) if IS_LONG else ["qwen3_omni_moe"]
BLOCK_SIZE, CONTEXT = 16, 32_768
RATE = 16_000  # that of all families: the environment lacks the package by which vLLM resamples
TYPED = ("<|audio|>", "<|audio_pad|>", "<|image_pad|>", "<|image|>", "<audio_soft_token>", "<so_embedding>", "<so_end>")
TEXTS = ("Listen.", "Zoë, 東京 👩🏽‍🚀", "two\nlines \n", " What is said, and by whom? " * 6, "", "?")


def sound(draw: random.Random) -> bytes:
    """Return a WAV file of drawn length and channels; one in four has bytes behind its end, which decoders skip."""
    channels, file = draw.choice((1, 1, 2)), io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(channels)
        out.setsampwidth(2)
        out.setframerate(RATE)
        out.writeframes(draw.randbytes(2 * channels * round(RATE * draw.choice((draw.uniform(0.1, 3), 1, 2)))))
    return file.getvalue() + b"\0\0" * (draw.random() < 0.25)


def sound_part(data: bytes, *, inline: bool) -> dict[str, Any]:
    text = base64.b64encode(data).decode()
    if inline:
        return {"type": "input_audio", "input_audio": {"data": text, "format": "wav"}}
    return {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{text}"}, "uuid": "the client's"}


def drawn(number: int, seed: int) -> list[dict[str, Any]]:
    """Return the fields of chats of one to five messages, with one to three recordings between texts and images."""
    draw = random.Random(seed)
    sounds = [sound(draw) for _ in range(12)]
    pictures = [image_part(picture(*size, seed=at)) for at, size in enumerate(((64, 48), (300, 200), (28, 560)))]

    def part() -> dict[str, Any]:
        kind = draw.random()
        if kind < 0.3:
            return draw.choice(pictures)
        return text_part(draw.choice(TYPED)) if kind < 0.35 else text_part(draw.choice(TEXTS))

    def chat() -> dict[str, Any]:
        messages: list[dict[str, Any]] = []
        for role in ("user", "assistant", "user", "assistant", "user")[: draw.choice((1, 3, 5))]:
            parts = [part() for _ in range(draw.randint(1, 4))] if role == "user" else [text_part(draw.choice(TEXTS))]
            messages.append({"role": role, "content": parts})
        if draw.random() < 0.5:
            messages.insert(0, {"role": "system", "content": "Be brief. " * draw.randint(1, 20)})
        asked = [message["content"] for message in messages if message["role"] == "user"]
        for _ in range(draw.randint(1, 3)):
            parts = draw.choice(asked)
            audio = sound_part(draw.choice(sounds), inline=draw.random() < 0.5)
            parts.insert(draw.randint(0, len(parts)), audio)
        return {"messages": messages}

    return [chat() for _ in range(number)]


@pytest.fixture(scope="module")
def routers() -> dict[str, Router]:
    folders = {family: Path(run_tool_or_skip("engines.unknown_families", family)) for family in FAMILIES}
    return {family: Router(folder, context=CONTEXT) for family, folder in folders.items()}


@pytest.fixture(scope="module")
def prepared(routers: dict[str, Router]) -> dict[str, list[Prepared]]:
    chats = drawn(CHATS, 20_261_128)
    return {family: [router.prepare(chat) for chat in chats] for family, router in routers.items()}


@pytest.fixture(scope="module")
def theirs(
    vllm_env: Path, routers: dict[str, Router], prepared: dict[str, list[Prepared]]
) -> dict[str, list[dict[str, Any]]]:
    asked = {
        router.folder: {
            "chats": [router.body(each) for each in prepared[family]],
            "context": CONTEXT,
            "block_size": BLOCK_SIZE,
        }
        for family, router in routers.items()
    }
    answers = own_prompts(vllm_env, asked, [pyav_folder()])
    return {family: answers[router.folder].listed() for family, router in routers.items()}


def difference(ours: Prepared, answer: dict[str, Any]) -> str:
    """Return what differs in the predicted part, or in name and place of what ends it; empty for nothing."""
    names = {image.identity: to_wire(image.identity) for image in ours.images}
    whole = ours.exactness == "exact"
    first = len(answer["ids"]) if whole else min(s.offset for s in ours.spans if s.identity not in names)
    before = [span for span in ours.spans if span.offset < first]
    places = [[names[span.identity], span.offset, span.length] for span in sorted(before, key=lambda s: s.offset)]
    found = list(takewhile(lambda place: place[1] < first, answer["images"]))
    ending = answer["images"][len(found) :]
    extras, blocks = block_extras(ours.spans, BLOCK_SIZE, len(ours.ids) // BLOCK_SIZE), first // BLOCK_SIZE
    known = {name: identity for identity, name in names.items()}
    keys = [b"".join(span_extra(known[name], at) for name, at in block) for block in answer["keys"][:blocks]]
    sounds = {names[image.identity] for image in ours.images if image.modality == "audio"}
    unequal = {
        "ids": (ours.ids if whole else ours.ids[:first]).tolist() != answer["ids"][:first],
        "images": places != found,
        "audio": bool(ending) if whole else ending[0][0] not in sounds or ending[0][1] != first,
        "keys": keys != [extras.get(number, b"") for number in range(blocks)],
    }
    return ", ".join(name for name, differs in unequal.items() if differs)


@pytest.mark.adopts(engine="vllm", check="audio")
@pytest.mark.proves("vllm", "audio", "{family}")
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_predicted_is_the_prompt_of_vllms_own_front_end(
    family: str,
    prepared: dict[str, list[Prepared]],
    theirs: dict[str, list[dict[str, Any]]],
    record: Record,
    figure: Figure,
) -> None:
    wrong, exact, images = list[str](), 0, 0
    for number, (ours, answer) in enumerate(zip(prepared[family], theirs[family], strict=True)):
        assert {reason.partition(":")[0] for reason in ours.reasons} <= {"audio"}
        if "refused" in answer:
            wrong.append(f"{number}: {answer['refused']}")
            continue
        wrong += [f"{number}: {differs}"] if (differs := difference(ours, answer)) else []
        exact += ours.exactness == "exact"
        images += sum(image.modality == "image" for image in ours.images)
    figures = {"prompts": len(theirs[family]), "exact": exact, "images": images, "mismatches": len(wrong)}
    record(f"audio {family}", figures)
    for what, count in figures.items():
        figure(what, count)
    assert not wrong, wrong[:10]
    assert exact == 0 if family == "gemma4" else CHATS / 4 < exact < CHATS * 0.9
