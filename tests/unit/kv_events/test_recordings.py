"""Recorded KV events of every cache layout, with the engine's own hits, against this project's consumer."""

import json
import lzma
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from artefacts import ROOT, Record
from kv_events.check import ConsumerError, Line, compare, read, recordings
from kv_events.mmrouter_consumer import Consumer

from mmrouter_lib.engines.sglang.identity import SENTINEL_BASE

FIGURES = ROOT / "tests" / "kv_events" / "figures" / "mmrouter.json"
FULL = "vllm-0.32.0-full-attention.jsonl.xz"
BOUNDED = ("windows-of-256-alone", "chunks-of-512")
"""Layouts of which the events do not tell all (docs/cache-layouts.md)."""


@pytest.fixture(params=recordings(), ids=lambda path: path.name.removesuffix(".jsonl.xz"))
def recording(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_case_45_no_answer_is_above_the_engines_hit_and_all_are_equal_where_events_tell_all(
    recording: Path, tmp_path: Path, record: Record
) -> None:
    found = compare(recording.name, read(recording), Consumer(tmp_path).take)
    record(
        f"KV events, {found.engine}, {found.layout}", f"{found.equal} of {found.requests} equal, {found.above} above"
    )
    assert found.above == 0
    assert found.equal == found.requests or any(layout in recording.name for layout in BOUNDED)
    assert asdict(found) in json.loads(FIGURES.read_text())


def test_a_recording_has_hits_and_evictions(recording: Path) -> None:
    first, *lines = read(recording)
    hits = [line["hit"] for line in lines if "request" in line]
    events = [
        event
        for line in lines
        if "events" in line
        for event in msgspec.msgpack.decode(bytes.fromhex(line["events"]))[1]
    ]
    assert first["layers"]
    assert sum(hit > 0 for hit in hits) >= 5
    assert {event["type"] for event in events} >= {"BlockStored", "BlockRemoved"}
    requests = [line["request"] for line in lines if "request" in line]
    assert any(one["images"] or max(one["tokens"]) >= SENTINEL_BASE for one in requests)


def test_an_answer_above_the_engines_hit_is_counted() -> None:
    def eager(line: Line) -> int | None:
        return len(line["request"]["tokens"]) if "request" in line else None

    (path,) = recordings(FULL)
    found = compare(path.name, read(path), eager)
    assert found.above == found.requests > 0


@pytest.mark.parametrize("answer", [None, -1, 10_000, True, "0"])
def test_an_answer_that_is_no_number_of_the_prompts_tokens_ends_the_check(answer: object) -> None:
    (path,) = recordings(FULL)
    with pytest.raises(ConsumerError, match="the answer to request 0"):
        compare(path.name, read(path), lambda _: answer)  # type: ignore[arg-type,return-value]


def test_the_consumer_never_sees_the_engines_hit() -> None:
    def lines() -> Iterator[Line]:
        yield {"request": {"tokens": [1]}, "hit": 0}

    def take(line: Line) -> int:
        assert "hit" not in line
        return 0

    assert compare("one", lines(), take).equal == 1


def test_a_recording_of_an_unknown_version_is_refused(tmp_path: Path) -> None:
    later = tmp_path / "later.jsonl.xz"
    later.write_bytes(lzma.compress(b'{"kv_events": 2}\n'))
    with pytest.raises(ValueError, match="version 2"):
        list(read(later))
