"""A real prefill and a real decode engine of SGLang, which hand KV blocks over, and their wire alone.

The engines' environment has NIXL take a CPU's memory for a device's (``hack/engines/sglang_env.py``). Mooncake has a
build without CUDA (``hack/engines/mooncake_package.py``). The wire is compared without an engine: the headers by which
two engines meet, the rooms that name a rank, and the requests in which an engine has its images encoded. What an engine
makes of them is computed by its own interpreter.
"""

import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from artefacts import run_tool_or_skip
from conformance.conftest import Figure, Shrunk
from conformance.engine_process import require_memory
from conformance.engines import deployed, histories, sglang_manifest
from conformance.own_code import answer_of
from conformance.setups import BY_MOONCAKE, TINY
from local.rig import MEDIA, Deployment
from long_form import parameters
from scenarios import SCENARIOS, Chat, Folder, Scenario, completions_repeat_whole, title
from waiting import wait_for

from mmrouter_lib.engines.sglang.stage_requests import (
    ROOMS,
    SLOTS,
    Meeting,
    decode_fields,
    image_key,
    override_headers,
    prefill_fields,
    urls,
)
from mmrouter_sim.encoders import EncodeRequest, split_shares

PROVES = pytest.mark.proves("sglang", "{deployment}", "qwen2_vl")
MOONCAKE = {"MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
PROVE_SECONDS = 300.0
HOST_COPIES = ("--disaggregation-decode-retraction-backup", "cpu_tensor")
"""Otherwise a decode engine registers a pool of host memory with CUDA when it starts."""


@pytest.fixture(scope="module", params=parameters(["prefill, decode", BY_MOONCAKE], "prefill, decode"))
def deployment(
    request: pytest.FixtureRequest, sglang_env: Path, shrunk: Shrunk, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    connector, variables = {"transferBackend": "nixl"}, {}
    if request.param == BY_MOONCAKE:
        connector = {"transferBackend": "mooncake"}
        variables = MOONCAKE | {"PYTHONPATH": run_tool_or_skip("engines.mooncake_package")}
    require_memory()
    pools = [("prefill", 1), ("decode", 1)]
    options: dict[str, Any] = {"kvConnector": connector, "variables": variables}
    made = sglang_manifest(shrunk(TINY), TINY, pools, *HOST_COPIES, **options)
    made["spec"]["routing"] = {"media": MEDIA}
    with deployed(sglang_env, tmp_path_factory.mktemp("pairs"), made) as deployment:
        wait_for(lambda: proved(deployment), PROVE_SECONDS, "both engines are verified by their half of an answer")
        yield deployment


def proved(deployment: Deployment) -> bool:
    standings = {(worker["role"], worker["standing"]) for worker in deployment.state()["workers"]}
    return standings == {("prefill", "verified"), ("decode", "verified")}


@PROVES
def test_the_gate_passes(deployment: Deployment) -> None:
    deployment.assert_gate_passes()


@PROVES
def test_two_engines_answer_together_and_the_prefills_cache_is_what_was_predicted(
    deployment: Deployment, chat: Chat, figure: Figure
) -> None:
    question = "What is to be seen here, and what of it is in the middle? " * 4
    first = chat.decided(chat.image("one"), question)
    again = chat.decided(chat.image("one"), question)
    roles = {worker["name"]: worker["role"] for worker in deployment.state()["workers"]}
    assert (roles[again["worker"]], roles[again["answers"]], again["form"]) == ("prefill", "decode", "prefill-decode")
    assert [(note["stage"], note["outcome"]) for note in again["chain"]] == [
        ("prefill", "done"),
        ("answer", "first_byte"),
    ]
    assert again["exactness"] == "exact"
    assert again["overlap"] == len(again["keys"]) > first["overlap"]
    compared = [len(truth.keys()) for truth in histories(deployment, TINY, "sglang")]
    figure("blocks compared", sum(compared))
    figure("mismatches", 0)


@PROVES
@pytest.mark.parametrize("scenario", SCENARIOS, ids=title)
def test_scenario(scenario: Scenario, chat: Chat, web: Folder) -> None:
    scenario(chat, web)


def test_completions_repeat_whole(chat: Chat) -> None:
    completions_repeat_whole(chat)


def test_a_pair_answers_a_response(chat: Chat) -> None:
    raw = chat.client.responses.with_raw_response.create(model="demo", input="Tell of the sea.", max_output_tokens=4)
    assert raw.parse().usage.output_tokens > 0
    assert [note["outcome"] for note in chat.decision(raw)["chain"]] == ["done", "first_byte"]


@PROVES
def test_a_streamed_answer_is_the_whole_one(chat: Chat) -> None:
    asked: dict[str, Any] = {"model": "demo", "max_tokens": 8, "temperature": 0}
    messages = chat.messages(chat.image("streamed"), "what?")
    whole = chat.client.chat.completions.create(messages=messages, **asked).choices[0].message.content
    stream = chat.client.chat.completions.create(messages=messages, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole


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
    *(Meeting(HOST, 1_000_003 * ranks + rank, rank, ranks) for rank, ranks in RANKS),
]
"""In the form of new ones, whose rooms are random (``tests/unit/engines/test_sglang_stages.py``)."""
IMAGES = [[f"data:image/png;base64,QUJD{number:04d}" for number in range(count)] for count in (1, 2, 5, 16, 17, 40)]


def shares(images: list[str]) -> list[dict[str, Any]]:
    return [body for _, body in split_shares("r", HOST, 4711, urls("127.0.0.1"), [{"url": url} for url in images])]


@pytest.fixture(scope="module")
def engine_says(sglang_env: Path) -> dict[str, Any]:
    fields = [*map(prefill_fields, MEETINGS), *(decode_fields(one, rank=1, ranks=3) for one in MEETINGS)]
    headers = list(map(override_headers, fields))
    random.seed(1)  # the order of shares, so that the kept answer is that of this run
    bodies = [body for images in IMAGES for body in shares(images)]
    questions = {"headers": headers, "images": IMAGES, "urls": urls("127.0.0.1"), "bodies": bodies}
    answers: dict[str, Any] = answer_of(sglang_env, ["-c", ASKS], questions)
    return answers


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
    for spread, images in zip(engine_says["spread"], IMAGES, strict=True):
        bodies = shares(images)
        counts = sorted((len(body["mm_items"]) for body in bodies), reverse=True)
        assert counts == [count for count in spread["counts"] if count]
        assert {body["num_parts"] for body in bodies} == {spread["parts"]} == {len(bodies)}
        assert Counter(item for body in bodies for item in body["mm_items"]) == Counter(spread["items"])
        assert (max(counts) == 1) == (len(images) <= SLOTS)


def test_the_engine_takes_what_the_simulated_one_posts_and_the_sidecar_finds_its_image(
    engine_says: dict[str, Any],
) -> None:
    assert set(engine_says["refused"]) == {None}
    assert [body["req_id"] for body in shares(IMAGES[2])][:3] == engine_says["names"]
    keys = [image_key(json.dumps(body).encode()) for body in shares(IMAGES[2])]
    assert len(set(keys)) == len(IMAGES[2])
    assert set(EncodeRequest.__struct_fields__) <= set(shares(IMAGES[0])[0])
