"""The renderer's answers: ids and spans, and errors for answers without router identities."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from mmrouter_lib.block_keys import Span
from mmrouter_lib.engines.vllm.renderer import RenderError, read_rendered, render_request
from mmrouter_lib.media_identity import to_wire

SHARED = Path(__file__).parents[4] / "shared" / "captures"
A, B = b"a" * 32, b"b" * 32


def answer(*images: tuple[bytes, int, int], ids: int = 40, **changes: Any) -> bytes:
    features = {
        "mm_hashes": {"image": [to_wire(identity) for identity, _, _ in images]},
        "mm_placeholders": {"image": [{"offset": at, "length": length} for _, at, length in images]},
        "kwargs_data": None,
    }
    body = {"request_id": "r", "token_ids": list(range(ids)), "features": features if images else None, "model": "m"}
    return json.dumps(body | changes).encode()


def test_ids_and_spans_are_in_prompt_order():
    ids, spans = read_rendered(answer((B, 20, 4), (A, 3, 6)))
    assert ids.tolist() == list(range(40))
    assert spans == (Span(3, 6, A), Span(20, 4, B))
    assert read_rendered(answer())[1] == ()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"<html>", "not a rendered prompt"),
        (b'{"token_ids": [-1]}', "not a rendered prompt"),
        (answer((A, 38, 4)), "is at 38"),
        (answer((A, 3, 0)), "is at 3"),
        (answer(features={"mm_hashes": {"video": ["x"]}}), "video"),
        (answer(features={"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": []}}), "1 images are named"),
        (
            answer(
                features={"mm_hashes": {"image": ["x"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}
            ),
            "no identity of mmrouter",
        ),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused_with_a_reason(raw: bytes, says: str):
    with pytest.raises(RenderError, match=says):
        read_rendered(raw)


def test_a_render_request_has_the_prompts_fields_and_no_tensors():
    body = {"model": "m", "messages": [], "stream": True, "cache_salt": "s", "tools": [{"type": "function"}]}
    assert render_request(body) == {"model": "m", "messages": [], "tools": [{"type": "function"}], "mm_payload": "none"}
    assert body["stream"]


def test_the_recorded_answer_of_a_real_renderer_is_read_whole():
    path = Path(os.environ.get("MMROUTER_CAPTURES", SHARED)) / "vllm" / "qwen2vl_render_generate.jsonl"
    if not path.is_file():
        pytest.skip(f"not run: no capture at {path} (MMROUTER_CAPTURES)")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    reply = next(row["reply"] for row in rows if row["kind"] == "render")
    reply["features"]["mm_hashes"]["image"] = [to_wire(A)]  # that request came without our identity
    ids, spans = read_rendered(json.dumps(reply).encode())
    assert len(ids) == len(reply["token_ids"])
    assert spans == (Span(17, 64, A),)
    assert set(ids[17:81]) == {364}
