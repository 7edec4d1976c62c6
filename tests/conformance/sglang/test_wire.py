"""What the router and the sidecar say to SGLang's engines, read by the engine's own code; no engine is started.

The headers by which two engines meet, the rooms that name a rank, and the requests in which an engine has its images
encoded. What the engine makes of them is computed by its own interpreter, once for the whole file.
"""

import json
import subprocess
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mmrouter_lib.engines.sglang.encoder_requests import SLOTS, image_key, urls
from mmrouter_lib.engines.sglang.pair_headers import ROOMS, Meeting, decode_headers, new_meeting, prefill_headers
from mmrouter_sim.sglang.encoder_shares import EncodeRequest, split_shares

HOST = "10.0.0.7"
ASKS = """
import json, random, sys
import torch
from sglang.srt.disaggregation.encoder import receiver, runtime
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.request_headers import apply_header_overrides
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.schedule_batch import Modality

told = json.load(sys.stdin)

def overridden(headers):
    request = GenerateReqInput(text="x")
    apply_header_overrides(request, headers)
    names = ("host", "port", "room")
    found = {name: getattr(request, "bootstrap_" + name) for name in names}
    found["fits"] = torch.tensor([request.bootstrap_room], dtype=torch.int64).tolist() == [request.bootstrap_room]
    return found | {"routed": request.routed_dp_rank, "prefill": request.disagg_prefill_dp_rank}

def spread(images, urls):
    # Only what the method reads of itself.
    items = [{"modality": Modality.IMAGE, "url": url} for url in images]
    counts = receiver.MMReceiverBase._assign_items_by_modality(None, items, len(urls))[Modality.IMAGE]
    parts = receiver.calculate_modality_num_parts([Modality.IMAGE], {Modality.IMAGE: counts})[0]
    return {"counts": sorted(counts, reverse=True), "parts": parts,
            "items": [receiver._encoder_media_item(item) for item in items]}

def fields(body):
    ChatCompletionRequest(**body)
    return True

print(json.dumps({
    "headers": [overridden(headers) for headers in told["headers"]],
    "spread": [spread(images, told["urls"]) for images in told["images"]],
    "refused": [runtime.validate_encode_request(body) for body in told["bodies"]],
    "names": [receiver.create_part_req_id("r", number) for number in range(3)],
}))
"""
RANKS = [(rank, ranks) for ranks in (1, 2, 5) for rank in range(ranks)]
MEETINGS = [
    Meeting(HOST, 0),
    Meeting(HOST, ROOMS - 1, port=9000),
    *(new_meeting(HOST, rank, ranks) for rank, ranks in RANKS),
]
IMAGES = [[f"data:image/png;base64,QUJD{number:04d}" for number in range(count)] for count in (1, 2, 5, 16, 17, 40)]


def shares(images: list[str]) -> list[dict[str, Any]]:
    """What a simulated engine posts."""
    return [body for _, body in split_shares("r", HOST, 4711, urls("127.0.0.1"), [{"url": url} for url in images])]


@pytest.fixture(scope="module")
def engine_says(sglang_env: Path) -> dict[str, Any]:
    headers = [*map(prefill_headers, MEETINGS), *(decode_headers(one, rank=1, ranks=3) for one in MEETINGS)]
    bodies = [body for images in IMAGES for body in shares(images)]
    told = {"headers": headers, "images": IMAGES, "urls": urls("127.0.0.1"), "bodies": bodies}
    done = subprocess.run(
        [str(sglang_env / "bin" / "python"), "-c", ASKS], input=json.dumps(told), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    return said


def test_the_engine_reads_where_two_engines_meet(engine_says: dict[str, Any]) -> None:
    for headers, meeting in zip(engine_says["headers"], MEETINGS * 2, strict=True):
        expected = asdict(meeting)
        assert {name: headers[name] for name in ("host", "port", "room")} == {
            name: expected[name] for name in ("host", "port", "room")
        }
        assert headers["fits"]


def test_a_room_names_the_prefill_rank_and_the_decode_engine_receives_both_ranks(engine_says: dict[str, Any]) -> None:
    prefills, decodes = engine_says["headers"][: len(MEETINGS)], engine_says["headers"][len(MEETINGS) :]
    for prefill, decode, meeting in zip(prefills, decodes, MEETINGS, strict=True):
        several = meeting.ranks > 1
        assert prefill["room"] % meeting.ranks == meeting.rank
        assert prefill["routed"] == (meeting.rank if several else None)
        assert (decode["routed"], decode["prefill"]) == (1, meeting.rank if several else None)


def test_images_are_spread_over_the_sidecars_urls_as_the_engine_spreads_them(engine_says: dict[str, Any]) -> None:
    """The simulated engine does as the real one: with a URL for each image, each travels alone."""
    for said, images in zip(engine_says["spread"], IMAGES, strict=True):
        bodies = shares(images)
        counts = sorted((len(body["mm_items"]) for body in bodies), reverse=True)
        assert counts == [count for count in said["counts"] if count]
        assert {body["num_parts"] for body in bodies} == {said["parts"]} == {len(bodies)}
        assert Counter(item for body in bodies for item in body["mm_items"]) == Counter(said["items"])
        assert (max(counts) == 1) == (len(images) <= SLOTS)


def test_the_engine_takes_what_the_simulated_one_posts_and_the_sidecar_finds_its_image(
    engine_says: dict[str, Any],
) -> None:
    assert set(engine_says["refused"]) == {None}
    assert [body["req_id"] for body in shares(IMAGES[2])][:3] == engine_says["names"]
    keys = [image_key(json.dumps(body).encode()) for body in shares(IMAGES[2])]
    assert len(set(keys)) == len(IMAGES[2])
    assert set(EncodeRequest.__struct_fields__) <= set(shares(IMAGES[0])[0])
