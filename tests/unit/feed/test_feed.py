"""Feed frames survive a round trip, and frames of every accepted version are still read.

``golden/vN.json`` holds a payload of every frame as version N wrote it, in hexadecimal. They never change: code that
cannot read one breaks every router or sidecar of an earlier release.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect
from msgspec.structs import replace

from mmrouter_lib import feed
from mmrouter_lib.cache_layout import CacheGroup

GOLDEN = {
    version: {name: bytes.fromhex(text) for name, text in json.loads(file.read_text()).items()}
    for version in feed.ACCEPTED
    for file in [Path(__file__).parent / "golden" / f"v{version}.json"]
}

BEAT = feed.Heartbeat("pod-1/0a1b2c3d", 7, 3, "vllm", "up", "0.32.0", 16, "org/model", "main", {})
DOWN = replace(BEAT, engine_state="down", engine_version="", block_size=0, revision="c0ffee", ranks=2, draining=True)
SGLANG = replace(BEAT, engine="sglang", engine_version="0.5.23", block_size=64, facts={"model_type": "qwen3_vl"})
SIGHTING = feed.ImageObservation(0, 0, 2**64 - 1, 5, 64, b"\3" * 32)
FRAMES: dict[str, feed.Published | feed.Request | feed.Reply] = {
    "delta": feed.Delta(7, 3, 1.5, 1, 0, "GPU", b"\1" * 8, b"\2" * 16),
    "delta_cleared": feed.Delta(2**53, 2**40, 1.5e9, 0, 2, "CPU", b"", b"", True),
    "load": feed.LoadReport(1, 3.0, 2.0, 0.25),
    "work": feed.Work("router-a", 1, 3, 40.5, 700.0),
    "heartbeat": replace(BEAT, digests={"config.json": "ab" * 32}),
    "heartbeat_canary": replace(
        DOWN, canary=feed.CanaryReport(7, "False", "identity", "block 2 differs", 6, "router-a")
    ),
    "heartbeat_groups": replace(
        SGLANG, groups=(CacheGroup(0, "sliding_window", 1024), CacheGroup(1, "full_attention"))
    ),
    "heartbeat_all_groups": replace(
        BEAT, groups=(CacheGroup(1, "full_attention", 0, 16), CacheGroup(0, "mamba", 0, 16, True)), all_groups=True
    ),
    "heartbeat_lookahead": replace(
        BEAT, groups=(CacheGroup(0, "full_attention", 0, 16, lookahead=1),), all_groups=True, drafter="drops"
    ),
    "heartbeat_shared": replace(BEAT, shared=feed.SharedDirectory(7 << 30, 8 << 30, 30 << 30, 64 << 30, True)),
    "sighting": SIGHTING,
    "sighting_sentinels": feed.ImageObservation(0, 0, None, 0, 4, b"", (2**62 - 1, 1, 2, 3)),
    "snapshot": feed.SnapshotRequest(1),
    "replay": feed.ReplayRequest(2, 7, 4),
    "detail": feed.DetailRequest(3, 7, 4, 5),
    "sighted": feed.ObservationsRequest(6),
    "encoders": feed.EncoderAddresses(7, "router-a", (("encoder-0", "10.0.0.7"), ("encoder-1", "10.0.0.8"))),
    "embedding_claim": feed.EmbeddingClaim(8, "router-a", b"\6" * 32, ("encoder-0/1a", "encoder-1/2b"), 3.0),
    "embedding_report": feed.EmbeddingReport(8, "router-a", b"\6" * 32, "encoder-0/1a", 4096, b"{}"),
    "embedding_answer": feed.EmbeddingAnswer(8, "held", "encoder-0/1a", 4096, b"{}"),
    "sightings_part": feed.ObservationsPart(
        6, (SIGHTING, feed.ImageObservation(1, 0, None, 0, 4, b"", (1, 2, 3, 4))), True
    ),
    "canary_claim": feed.CanaryClaim(4, 7, "router-a", 30.0),
    "canary_result": feed.CanaryResult(5, feed.CanaryReport(7, "True", compared=6, router="router-a")),
    "snapshot_part": feed.SnapshotPart(1, "pod-1/0a1b2c3d", 7, 3, 0, 0, "GPU", b"\4" * 24, True),
    "replay_part": feed.ReplayPart(2, (feed.Delta(7, 4, 2.5, 0, 0, "GPU", b"\5" * 8, b""),), True),
    "replay_part_gone": feed.ReplayPart(2, (), True, True),
    "detail_part": feed.DetailPart(3, (feed.RawBatch(4, 0, 12, b"\x93\xcb"),), False, True),
    "claim_answer": feed.ClaimAnswer(4, False, "router-b"),
    "accepted": feed.Accepted(5),
    "refused": feed.Refused(6, "epoch 6 is not the present one, 7"),
}

texts = st.text(max_size=20)


def drawn(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Return values of a field's type."""
    match kind:
        case inspect.StructType(cls=struct, fields=fields):
            return st.builds(struct, *(drawn(field.type) for field in fields))
        case inspect.UnionType(types=types):
            return st.one_of(*map(drawn, types))
        case inspect.VarTupleType(item_type=item):
            return st.lists(drawn(item), max_size=3).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(drawn, items))
        case inspect.DictType():
            return st.dictionaries(texts, texts, max_size=3)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
    if isinstance(kind, inspect.IntType):
        return st.integers(kind.ge or 0, kind.le or 2**64 - 1)
    return {
        inspect.FloatType: st.floats(0, 1e12),
        inspect.StrType: texts,
        inspect.BytesType: st.lists(st.binary(min_size=8, max_size=8), max_size=3).map(b"".join),
        inspect.BoolType: st.booleans(),
        inspect.NoneType: st.none(),
    }[type(kind)]


KINDS = {*get_args(feed.Published), *get_args(feed.Request), *get_args(feed.Reply)}
frames = st.one_of(*(drawn(inspect.type_info(kind)) for kind in sorted(KINDS, key=lambda kind: kind.__name__)))


READERS = (feed.decode_published, feed.decode_request, feed.decode_reply)


def decode(frame: Any, payload: bytes) -> Any:
    kinds = (feed.Published, feed.Request, feed.Reply)
    return next(read(payload) for kind, read in zip(kinds, READERS, strict=True) if isinstance(frame, get_args(kind)))


def is_prefix(old: Any, new: Any) -> bool:
    """Whether a value is the old one, or arrays of it have grown at the end."""
    if not isinstance(old, list):
        return bool(old == new)
    return len(old) <= len(new) and all(map(is_prefix, old, new))


@given(frames)
def test_every_frame_survives_a_round_trip(frame: Any) -> None:
    assert decode(frame, feed.encode(frame)) == frame


def test_every_kind_of_frame_has_a_golden_payload() -> None:
    assert {type(frame) for frame in FRAMES.values()} == KINDS
    assert GOLDEN[feed.VERSION].keys() == FRAMES.keys()


@pytest.mark.parametrize("version", feed.ACCEPTED)
@pytest.mark.parametrize("name", FRAMES)
def test_frames_of_every_accepted_version_are_read(version: int, name: str) -> None:
    payload = GOLDEN[version][name]
    assert payload[0] == version
    assert decode(FRAMES[name], payload) == FRAMES[name]


@pytest.mark.parametrize("name", FRAMES)
def test_frames_are_written_as_the_golden_ones(name: str) -> None:
    """A change of the bytes that older readers cannot skip needs a new version, not a new golden file."""
    written = feed.encode(FRAMES[name])
    golden = GOLDEN[feed.VERSION][name]
    old, new = (msgspec.msgpack.decode(payload[1:]) for payload in (golden, written))
    assert is_prefix(old, new)
    assert written[0] == golden[0]


@given(frames)
def test_a_field_added_at_the_end_by_a_later_release_is_skipped(frame: Any) -> None:
    payload = feed.encode(frame)
    longer = payload[:1] + msgspec.msgpack.encode([*msgspec.msgpack.decode(payload[1:]), {"later": 1}])
    assert decode(frame, longer) == frame


@pytest.mark.parametrize("version", [0, feed.VERSION + 1, 255])
def test_another_version_is_refused_by_its_number(version: int) -> None:
    payload = bytes((version,)) + feed.encode(feed.SnapshotRequest(1))[1:]
    for read in READERS:
        with pytest.raises(feed.FeedError, match=str(version)):
            read(payload)


def test_a_frame_on_the_wrong_socket_is_refused() -> None:
    with pytest.raises(feed.FeedError, match="snapshot"):
        feed.decode_published(feed.encode(feed.SnapshotRequest(1)))
    with pytest.raises(feed.FeedError, match="load"):
        feed.decode_request(feed.encode(feed.LoadReport(0, 0, 0, 0)))


@pytest.mark.parametrize("name", ["stored", "removed", "keys"])
def test_keys_that_are_cut_off_are_refused(name: str) -> None:
    """An index that took them would end the router's loop."""
    fields: dict[str, list[Any]] = {
        "stored": ["delta", 1, 1, 0.0, 0, 0, "GPU", bytes(15), b""],
        "removed": ["delta", 1, 1, 0.0, 0, 0, "GPU", bytes(8), bytes(1)],
        "keys": ["snapshot_part", 1, "w", 1, 1, 0, 0, "GPU", bytes(9), True],
    }
    payload = bytes((feed.VERSION,)) + msgspec.msgpack.encode(fields[name])
    with pytest.raises(feed.FeedError, match="a key is cut off"):
        (feed.decode_reply if name == "keys" else feed.decode_published)(payload)


@pytest.mark.parametrize("ranks", [0, feed.MAX_RANKS + 1, 200_000])
def test_a_heartbeat_with_more_ranks_than_an_engine_can_have_is_refused(ranks: int) -> None:
    with pytest.raises(feed.FeedError, match=r"`int` [<>]= "):
        feed.decode_published(feed.encode(msgspec.structs.replace(BEAT, ranks=ranks)))


@given(frames, st.data())
def test_a_damaged_frame_raises_nothing_but_feed_errors(frame: Any, data: st.DataObject) -> None:
    payload = bytearray(feed.encode(frame))
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    damaged = bytes(payload[: data.draw(st.integers(0, len(payload)))])
    for read in READERS:
        with suppress(feed.FeedError):
            assert read(damaged)
