"""Drawn videos through vLLM's own loader and processor, without an engine: prompts, places, names and extra keys."""

import base64
from pathlib import Path
from typing import Any

import pytest
from artefacts import Record, run_tool_or_skip
from conformance.conftest import Figure, model_folder
from conformance.rendering import own_prompts
from conformance.setups import REPOSITORIES, VIDEOS
from conformance.videos import FAST, DrawnVideo, drawn_matroska, drawn_videos, encoded
from long_form import IS_LONG, parameters

from mmrouter_lib.block_keys import block_extras, span_extra
from mmrouter_lib.families import ImageSizeError, load_family
from mmrouter_lib.prompt import Prompter, PromptImage
from mmrouter_lib.video_header import read_video_header

NUMBER = 150 if IS_LONG else 36
ALWAYS = ("qwen2_vl", "qwen3_vl")
"""Families outside of the long form."""
BLOCK_SIZE = 16
EXTRA = [
    DrawnVideo(frames=900, rate="30", width=32, height=32),
    DrawnVideo(frames=800, rate="2", width=32, height=32, codec="mpeg4"),
    DrawnVideo(frames=230, rate="29", width=48, height=34, codec="mpeg4"),
    DrawnVideo(frames=12, width=640, height=480),
    DrawnVideo(frames=30, codec="libx265", encoder=FAST["libx265"]),
    DrawnVideo(frames=25, uneven=True),
    DrawnVideo(frames=20, rate="25", codec="libvpx-vp9", encoder=FAST["libvpx-vp9"], uneven=True),
]


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[DrawnVideo, bytes]]:
    folder = tmp_path_factory.mktemp("videos")
    drawn = [*drawn_videos(NUMBER, 20_261_127), *drawn_matroska(NUMBER // 2, 27), *EXTRA]
    return [(video, encoded(video, folder / f"{number}_{video.name}")) for number, video in enumerate(drawn)]


@pytest.fixture(scope="module")
def chats(videos: list[tuple[DrawnVideo, bytes]]) -> list[list[int]]:
    """The numbers of the videos of each chat: one, or two with a text between them."""
    numbers = list(range(len(videos)))
    return [numbers[at : at + 2] for at in range(0, 8, 2)] + [[number] for number in numbers[8:]]


def body(videos: list[tuple[DrawnVideo, bytes]], chat: list[int]) -> dict[str, Any]:
    content: list[dict[str, Any]] = []
    for number in chat:
        url = f"data:video/mp4;base64,{base64.b64encode(videos[number][1]).decode()}"
        content += [{"type": "video_url", "video_url": {"url": url}, "uuid": name(number)}]
        content += [{"type": "text", "text": f"What happens in {number}?"}]
    return {"messages": [{"role": "user", "content": content}]}


def name(number: int) -> str:
    return f"video-{number}"


def identity(number: int) -> bytes:
    return number.to_bytes(32, "little")


@pytest.fixture(scope="module")
def theirs(
    vllm_env: Path, videos: list[tuple[DrawnVideo, bytes]], chats: list[list[int]]
) -> dict[str, list[dict[str, Any]]]:
    bodies = [body(videos, chat) for chat in chats]
    folders = {family: folder_of(family) for family in (VIDEOS if IS_LONG else ALWAYS)}
    asked = {"chats": bodies, "context": 32_768, "block_size": BLOCK_SIZE}
    answers = own_prompts(vllm_env, dict.fromkeys(folders.values(), asked))
    return {family: answers[folder].listed() for family, folder in folders.items()}


def folder_of(family: str) -> Path:
    if family == "qwen3_5":
        return Path(run_tool_or_skip("engines.unknown_families", family))
    return model_folder(REPOSITORIES[family].replace("/", "--"))


@pytest.mark.proves("vllm", "videos", "{family}")
@pytest.mark.parametrize("family", parameters(VIDEOS, *ALWAYS))
def test_videos_have_the_tokens_places_and_extra_keys_that_vllms_own_front_end_gives_them(
    family: str,
    theirs: dict[str, list[dict[str, Any]]],
    videos: list[tuple[DrawnVideo, bytes]],
    chats: list[list[int]],
    record: Record,
    figure: Figure,
) -> None:
    folder = folder_of(family)
    loaded = load_family(folder, None)
    assert loaded is not None
    assert loaded.video_id is not None
    prompter = Prompter.load(folder, family=loaded)
    wrong, refused, tokens = [], 0, 0
    for chat, answer in zip(chats, theirs[family], strict=True):
        shown = []
        try:
            for number in chat:
                header = read_video_header(videos[number][1])
                shown.append(PromptImage(identity(number), loaded.count_video(header), modality="video", video=header))
        except ImageSizeError:
            refused += 1
            if "refused" not in answer:
                wrong.append([videos[number][0].name for number in chat])
            continue
        expanded = prompter.prompt(body(videos, chat), shown)
        places = [[name(int.from_bytes(span.identity, "little")), span.offset, span.length] for span in expanded.spans]
        blocks = len(expanded.ids) // BLOCK_SIZE
        extras = block_extras(expanded.spans, BLOCK_SIZE, blocks)
        named = {name(number): identity(number) for number in chat}
        keys = [b"".join(span_extra(named[each], at) for each, at in block) for block in answer.get("keys", ())]
        tokens += len(expanded.ids)
        if (expanded.ids.tolist(), places) != (answer.get("ids"), answer.get("images")) or keys != [
            extras.get(number, b"") for number in range(blocks)
        ]:
            wrong.append([videos[number][0].name for number in chat])
    figures = {"videos": len(videos), "prompts": len(chats), "refused by both": refused, "mismatches": len(wrong)}
    record(f"videos {family}", {**figures, "tokens": tokens})
    for what, count in figures.items():
        figure(what, count)
    assert not wrong, wrong[:10]
