"""Chat requests to vLLM: identities are set, refused fields removed, large bodies shared; errors name their field."""

import copy
from pathlib import Path
from typing import Any

import pytest

from mmrouter_lib.engines.base.request_rewriting import ImageRewrite
from mmrouter_lib.engines.vllm.media_files import file_url, is_file_refused
from mmrouter_lib.engines.vllm.request import REFUSED_FIELDS, prompt_error_field, rewrite_chat

BIG = "data:image/png;base64," + "A" * 1_000_000


def body(**fields: Any) -> dict[str, Any]:
    return {
        "model": "client-name",
        "messages": [
            {"role": "system", "content": "be brief"},
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "what is this"},
                    {"type": "image_url", "image_url": {"url": "http://client.example/a.png", "detail": "high"}},
                    {"type": "image_url", "image_url": {"url": BIG}, "uuid": "stolen"},
                ],
            },
        ],
        **fields,
    }


IMAGES = [ImageRewrite(1, 1, "data:image/png;base64,QQ==", "m1-aa"), ImageRewrite(1, 2, BIG, "m1-bb")]


def test_every_image_gets_the_bytes_and_the_identity() -> None:
    new = rewrite_chat(body(), IMAGES, model="served", cache_salt="tenant").body
    parts = new["messages"][1]["content"]
    assert parts[1] == {
        "type": "image_url",
        "image_url": {"url": "data:image/png;base64,QQ==", "detail": "high"},
        "uuid": "m1-aa",
    }
    assert parts[2] == {"type": "image_url", "image_url": {"url": BIG}, "uuid": "m1-bb"}
    assert (new["model"], new["cache_salt"]) == ("served", "tenant")


def test_the_clients_body_is_not_changed_and_megabytes_are_shared() -> None:
    old = body(cache_salt="mine", vllm_xargs={"kv_cache_report_mode": "full"})
    before = copy.deepcopy(old)
    new = rewrite_chat(old, IMAGES, model="served", cache_salt=None).body
    assert old == before
    assert new["messages"][0] is old["messages"][0]
    assert new["messages"][1]["content"][0] is old["messages"][1]["content"][0]
    assert new["messages"][1]["content"][2]["image_url"]["url"] is IMAGES[1].url


@pytest.mark.parametrize("field", REFUSED_FIELDS)
def test_refused_fields_are_removed_and_named(field: str) -> None:
    rewritten = rewrite_chat(body(**{field: "x"}), IMAGES, model="served", cache_salt=None)
    assert field not in rewritten.body
    assert set(rewritten.removed) == {field, "uuid"}


def test_a_clients_salt_never_takes_the_place_of_the_tenants() -> None:
    rewritten = rewrite_chat(body(cache_salt="theirs"), IMAGES, model="served", cache_salt="ours")
    assert rewritten.body["cache_salt"] == "ours"
    assert "cache_salt" in rewritten.removed


def test_uuids_are_removed_from_parts_and_images() -> None:
    request = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "video_url", "video_url": {"url": "v"}, "uuid": "u"}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "i", "uuid": "inside"}}]},
        ],
    }
    rewritten = rewrite_chat(request, [ImageRewrite(1, 0, "data:,", "m1-cc")], model="m", cache_salt=None)
    assert rewritten.body["messages"][0]["content"] == [{"type": "video_url", "video_url": {"url": "v"}}]
    assert rewritten.body["messages"][1]["content"][0]["image_url"] == {"url": "data:,"}
    assert set(rewritten.removed) == {"uuid", "image_url.uuid"}


def test_only_the_keys_that_steer_caches_leave_vllm_xargs() -> None:
    xargs = {"kv_cache_report_mode": "full", "kv_transfer_params": "x", "mine": 1}
    rewritten = rewrite_chat(body(vllm_xargs=xargs), IMAGES, model="m", cache_salt=None)
    assert rewritten.body["vllm_xargs"] == {"mine": 1}
    assert {"vllm_xargs.kv_cache_report_mode", "vllm_xargs.kv_transfer_params"} <= set(rewritten.removed)


def test_options_that_the_engine_itself_refuses_stay_in_place() -> None:
    fields = {"mm_processor_kwargs": {"max_pixels": 1}, "media_io_kwargs": {"image": {}}, "priority": 3, "seed": 7}
    new = rewrite_chat(body(**fields), IMAGES, model="m", cache_salt=None).body
    assert fields.items() <= new.items()


def test_an_image_written_as_a_bare_string_becomes_a_whole_part() -> None:
    request = {
        "model": "m",
        "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "http://x"}]}],
    }
    new = rewrite_chat(request, [ImageRewrite(0, 0, "data:,", "m1-dd")], model="m", cache_salt=None).body
    assert new["messages"][0]["content"] == [{"type": "image_url", "image_url": {"url": "data:,"}, "uuid": "m1-dd"}]


@pytest.mark.parametrize("place", [(7, 0), (1, 9), (0, 0)])
def test_an_image_without_a_place_is_an_error(place: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=rf"messages\[{place[0]}\]"):
        rewrite_chat(body(), [ImageRewrite(*place, "data:,", "m1-ee")], model="m", cache_salt=None)


def test_captured_errors_name_the_field_that_they_are_about(captures: Any) -> None:
    named = {}
    for name in captures.names():
        for line in captures.lines(name):
            answer = line.get("reply") if isinstance(line.get("reply"), dict) else {}
            error = answer.get("error") or line.get("error")
            if error:
                named[error["message"][:24]] = prompt_error_field(line["status"], {"error": error})
    assert named == {
        "Failed to apply Phi3VPro": "messages",
        "EngineCore encountered a": None,
        "Cache miss for image at ": "messages",
        "Per-request mm_processor": "mm_processor_kwargs",
        "Per-request media_io_kwa": "media_io_kwargs",
        "Internal server error": None,
    }


@pytest.mark.parametrize(
    ("status", "answer", "field"),
    [
        (400, {"error": {"message": "x", "param": "body.temperature"}}, "temperature"),
        (
            400,
            {"error": {"message": "At most 1 image(s) may be provided in one prompt.", "param": "image"}},
            "messages",
        ),
        (400, {"error": {"message": "This model's maximum context length is 8", "param": "input_tokens"}}, "messages"),
        (400, {"message": "The decoder prompt (length 9) is longer than the maximum model length of 8."}, "messages"),
        (400, {"error": {"message": "bad (parameter=top_p, value=7)", "param": None}}, "top_p"),
        (400, {"error": {"message": None, "param": 3}}, None),
        (400, {"error": "text"}, None),
        (200, {"error": {"message": "x", "param": "y"}}, None),
    ],
)
def test_error_fields(status: int, answer: dict[str, Any], field: str | None) -> None:
    assert prompt_error_field(status, answer) == field


@pytest.mark.parametrize(
    ("status", "said", "about_a_file"),
    [
        (500, "[Errno 2] No such file or directory: '<path>'", True),
        (500, "[Errno 13] Permission denied: '<path>'", True),
        (500, "Cannot load local files without `--allowed-local-media-path`.", True),
        (400, "The file path <path> must be a subpath of `--allowed-local-media-path <path>`.", True),
        (400, "Failed to load image: cannot identify image file <_io.BytesIO object>", False),
        (500, "cannot schedule new futures after shutdown", False),
        (503, "[Errno 2] No such file or directory: '<path>'", False),
    ],
)
def test_errors_about_local_files_are_recognized(status, said, about_a_file):
    assert is_file_refused(status, f'{{"error": {{"message": "{said}"}}}}'.encode()) is about_a_file


def test_a_path_becomes_a_quoted_file_url():
    assert file_url(Path("/a b/c%d.png")) == "file:///a%20b/c%25d.png"
    with pytest.raises(ValueError, match="relative"):
        file_url(Path("a.png"))
