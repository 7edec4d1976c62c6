"""The whole sidecar over real sockets: an engine's publisher on one side, a router with CURVE on the other."""

import asyncio
import json
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
import zmq
import zmq.asyncio
from unit.conftest import shared_folder
from unit.sidecar.conftest import batch, feed_socket, follow, removed, stored
from waiting import until

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys, chain
from mmrouter_lib.engines.base.events import Cleared, Removed, Stored
from mmrouter_lib.engines.vllm.events import decode_batch
from mmrouter_sidecar.engine import sockets as engine_module


def keys(one: Any, *ids: int, size: int = 2) -> set[int]:
    """Keys of a prompt without images, as a router predicts them."""
    seed = one.settings.seed(None, None)
    return set(block_keys(array("I", ids), size, [], seed))


async def publish(engine: Any, *events: Any, live: bool = True) -> None:
    """Publish each event in a batch of its own."""
    for event in events:
        await engine.publish(batch(event), live=live)


async def applied(one: Any, batches: int) -> None:
    """Wait until the sidecar applied so many batches."""
    await until(lambda: one.metric("batches_total") >= batches)


@pytest.fixture
async def pair(start: Any, engines: Any) -> Any:
    """A sidecar and its engine."""
    return await start(), engines()


async def test_stores_and_removals_reach_the_router_in_order(start: Any, engines: Any, router: Any) -> None:
    one = await start()
    await router.heartbeat()
    engine = engines()
    await publish(engine, stored([1, 2], ids=[5, 6, 7, 8]), stored([3], 2, ids=[9, 9]), removed(3))
    await publish(engine, stored([4], 2, ids=[1, 1]))
    index: dict[Any, set[int]] = {}
    await applied(one, 4)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(one, 5, 6, 7, 8, 1, 1)}
    last = (await router.heartbeat(lambda beat: beat.seq > 0)).seq
    await router.until(lambda: any(delta.seq == last for delta in router.of(feed.Delta)))
    deltas = router.of(feed.Delta)
    assert [delta.seq for delta in deltas] == list(range(1, last + 1))
    for delta in deltas:
        follow(index, delta)
    assert index == {(0, 0, "GPU"): keys(one, 5, 6, 7, 8, 1, 1)}


async def test_a_gap_is_filled_by_a_replay_and_duplicates_bring_back_no_removed_block(
    pair: Any, router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 1000.0)  # on a busy machine a silence is no gap
    one, engine = pair
    first = batch(stored([1, 2], ids=[5, 6, 7, 8]))
    await engine.publish(first)
    await applied(one, 1)
    # Else the replay that every sidecar requests at its start could bring what is missing, and there would be no gap.
    await until(lambda: one.metric("replays_total", outcome="complete") >= 1)
    await publish(engine, removed(2), stored([3], 1, ids=[9, 9]), live=False)
    await publish(engine, stored([4], 3, ids=[1, 1]))
    await applied(one, 4)
    duplicates = one.metric("duplicates_total")
    await engine.send(0, first)
    await until(lambda: one.metric("duplicates_total") > duplicates)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(one, 5, 6, 9, 9, 1, 1)}
    assert one.metric("gaps_total") >= 1
    assert one.metric("events_total", what="unknown_parent") == 0


async def test_a_dropped_tail_is_requested_after_silence(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.05)
    one, engine = pair
    await engine.publish(batch(stored([1])))
    await applied(one, 1)
    await engine.publish(batch(stored([2])), live=False)
    await applied(one, 2)


async def test_history_beyond_the_engines_buffer_is_reported_as_lost(start: Any, engines: Any, router: Any) -> None:
    one = await start()
    engine = engines(buffer=2)
    await publish(engine, stored([1]))
    await applied(one, 1)
    before = await router.heartbeat(lambda beat: beat.seq == 1)
    await publish(engine, *(stored([number]) for number in range(2, 8)), live=False)
    await publish(engine, stored([8]))
    after = await router.heartbeat(lambda beat: beat.epoch > before.epoch)
    assert after.worker == before.worker
    await applied(one, 3)
    assert len((await router.snapshot())[0, 0, "GPU"]) == 2
    assert one.metric("lost_total", reason="history") == 1
    assert one.metric("skipped_batches_total") == 5


async def test_the_engines_end_is_a_new_empty_epoch_under_a_new_name(pair: Any, engines: Any, router: Any) -> None:
    one, engine = pair
    await publish(engine, *(stored([number]) for number in (1, 2, 3)))
    await applied(one, 3)
    before = await router.heartbeat(lambda beat: beat.seq > 0)
    engine.kill()
    after = await router.heartbeat(lambda beat: beat.worker != before.worker)
    assert after.epoch > before.epoch
    assert (after.seq, after.engine_state) == (0, "down")
    assert await router.snapshot() == {}
    fresh = engines()
    await fresh.publish(batch(stored([7], ids=[5, 6])))
    await applied(one, 4)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(one, 5, 6)}


async def test_a_stranger_on_the_event_port_ends_no_epoch(pair: Any, router: Any) -> None:
    one, engine = pair
    await engine.publish(batch(stored([1])))
    await applied(one, 1)
    epoch = one.sidecar.relay.epoch
    for greeting in (b"", b"GET / HTTP/1.1\r\n\r\n"):
        _, writer = await asyncio.open_connection(one.settings.loopback, 5557)
        writer.write(greeting)
        writer.close()
        await writer.wait_closed()
    await engine.publish(batch(stored([2])))
    await applied(one, 2)
    assert one.sidecar.relay.epoch == epoch


async def test_a_restarted_sidecar_resumes_from_journal_and_replay(pair: Any, start: Any, router: Any) -> None:
    one, engine = pair
    await engine.publish(batch(stored([1, 2], ids=[5, 6, 7, 8])))
    await applied(one, 1)
    before = await router.heartbeat(lambda beat: beat.seq == 1)
    await one.stop()
    await engine.publish(batch(removed(2)), live=False)
    again = await start()
    await applied(again, 1)
    after = await router.heartbeat(lambda beat: beat.seq == 2)
    assert (after.worker, after.epoch) == (before.worker, before.epoch)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(again, 5, 6)}
    assert again.metric("epochs_total", reason="other_instance") == 0


async def test_a_resumed_sidecar_publishes_that_its_engine_is_up_only_after_the_missed_events(
    pair: Any, start: Any, router: Any, http_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "REPLAY_SECONDS", 0.2)
    one, engine = pair
    await engine.publish(batch(stored([1, 2], ids=[5, 6, 7, 8])))
    await applied(one, 1)
    await one.stop()
    await engine.publish(batch(removed(2)), live=False)
    engine.answer_replays = False
    again = await start()
    await until(lambda: again.sidecar.relay.facts.state == "up")
    assert (await router.heartbeat()).engine_state == "starting"
    engine.answer_replays = True
    up = await router.heartbeat(lambda beat: beat.engine_state == "up")
    assert up.seq == 2, "the state that is up contains the missed removal"
    assert await router.snapshot() == {(0, 0, "GPU"): keys(again, 5, 6)}


async def test_a_resumed_state_that_the_engine_never_confirms_is_discarded(
    pair: Any, start: Any, router: Any, http_engine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "REPLAY_SECONDS", 0.2)
    monkeypatch.setattr(engine_module, "RESUME_SECONDS", 0.1)
    monkeypatch.setattr(engine_module, "QUIET_SECONDS", 0.05)
    one, engine = pair
    await engine.publish(batch(stored([1, 2], ids=[5, 6, 7, 8])))
    await applied(one, 1)
    before = await router.heartbeat(lambda beat: beat.seq == 1)
    await one.stop()
    engine.answer_replays = False
    again = await start()
    up = await router.heartbeat(lambda beat: beat.engine_state == "up")
    assert up.epoch > before.epoch
    assert await router.snapshot() == {}
    engine.answer_replays = True
    await applied(again, 1)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(again, 5, 6, 7, 8)}


async def test_a_restarted_sidecar_detects_a_replaced_engine_and_replays_what_it_sent_before(
    pair: Any, start: Any, engines: Any, router: Any
) -> None:
    one, engine = pair
    await publish(engine, *(stored([number]) for number in (1, 2, 3)))
    await applied(one, 3)
    before = await router.heartbeat(lambda beat: beat.seq > 0)
    await one.stop()
    engine.kill()
    await publish(engines(), *(stored([number + 1], ids=[number, 77]) for number in range(3)), live=False)
    again = await start()
    await applied(again, 3)
    after = await router.heartbeat(lambda beat: beat.worker != before.worker)
    assert after.epoch > before.epoch
    assert (await router.snapshot())[0, 0, "GPU"] == keys(again, 0, 77) | keys(again, 1, 77) | keys(again, 2, 77)


async def test_ranks_have_streams_of_their_own_and_end_together(
    start: Any, settings: Any, engines: Any, router: Any
) -> None:
    one = await start(replace(settings, ranks=2))
    ranks = [engines(rank=0), engines(rank=1)]
    await ranks[0].publish(batch(stored([1], ids=[5, 6])))
    await ranks[1].publish(batch(stored([1], ids=[7, 8]), rank=1))
    await applied(one, 2)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(one, 5, 6), (1, 0, "GPU"): keys(one, 7, 8)}
    before = await router.heartbeat(lambda beat: beat.ranks == 2)
    ranks[1].kill()
    await router.heartbeat(lambda beat: beat.worker != before.worker)
    await applied(one, 3)
    assert await router.snapshot() == {(0, 0, "GPU"): keys(one, 5, 6)}, "the rank that lives is read anew"


@pytest.mark.parametrize("who", ["stranger", "anonymous"])
async def test_only_the_routers_key_is_accepted_and_refusals_are_counted(
    start: Any, settings: Any, curve: Any, who: str
) -> None:
    one = await start()
    context = zmq.asyncio.Context()
    try:
        for kind in (zmq.SUB, zmq.DEALER):
            socket = feed_socket(context, kind, settings.pod_ip, curve, who if who == "stranger" else "")
            if kind == zmq.DEALER:
                with suppress(zmq.Again):  # the sidecar has already ended the connection
                    await socket.send_multipart([b"", feed.encode(feed.SnapshotRequest(1))], flags=zmq.NOBLOCK)
            assert not await socket.poll(150), "no answer, and not even a heartbeat"
        # Without CURVE whichever side notices first hangs up, so the sidecar sees a protocol fault or just an end.
        reasons = ["key"] if who == "stranger" else ["protocol", "handshake"]
        await until(lambda: sum(one.metric("refusals_total", reason=reason) for reason in reasons))
    finally:
        context.destroy(linger=0)


async def test_another_version_of_the_feed_is_refused_by_name(start: Any, router: Any) -> None:
    one = await start()
    payload = bytes((feed.VERSION + 1,)) + feed.encode(feed.SnapshotRequest(77))[1:]
    (reply,) = await router.ask_raw(payload)
    assert isinstance(reply, feed.Refused)
    assert reply.id == 77
    assert str(feed.VERSION + 1) in reply.reason
    (reply,) = await router.ask_raw(bytes((feed.VERSION,)) + b"\xc1")
    assert isinstance(reply, feed.Refused)
    assert one.metric("refusals_total", reason="undecodable") == 2
    assert await router.ask(feed.SnapshotRequest), "the connection stays usable"


async def test_every_captured_engine_stream_yields_its_blocks(
    start: Any, engines: Any, router: Any, settings: Any
) -> None:
    folder = shared_folder("MMROUTER_CAPTURES", "captures/vllm")
    one = await start()
    done = 0
    for name in ("qwen2vl_evict_byteshash", "qwen2vl_core_uuid_clear", "qwen3vl-real"):
        lines = [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        payloads = [bytes.fromhex(frame["payload"]) for line in lines for frame in line.get("frames", [])]
        held: dict[int, int] = {}
        copies: dict[int, int] = {}
        for raw in payloads:
            for event in decode_batch(raw).events:
                match event:
                    case Cleared():
                        held, copies = {}, {}
                    case Stored():
                        parent = settings.seed(event.lora, event.salt) if event.parent is None else held[event.parent]
                        new = chain(event.ids, event.block_size, len(event.hashes), event.extras, parent)
                        for number, key in zip(event.hashes, new, strict=True):
                            held[number] = key
                            copies[number] = copies.get(number, 0) + 1
                    case Removed():
                        for number in event.hashes:
                            copies[number] -= 1
                            if not copies[number]:
                                del held[number], copies[number]
        engine = engines(topic=b"kv@engine-a")
        for place, raw in enumerate(payloads):
            await engine.publish(raw, live=place % 3 != 1)
        if place % 3 == 1:
            await engine.send(place, payloads[place])
        done += len(payloads)
        await applied(one, done)
        assert (await router.snapshot())[0, 0, "GPU"] == set(held.values())
        epoch = one.sidecar.relay.epoch
        engine.kill()
        await router.heartbeat(lambda beat, epoch=epoch: beat.epoch > epoch)
    assert one.metric("events_total", what="unknown_parent") == 0
    assert one.metric("events_total", what="unknown_removed") == 0


async def fetch(url: str, method: str = "GET", **options: Any) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.request(method, url, **options) as answer:
        return answer.status, await answer.text()


@pytest.mark.parametrize(
    ("uses", "reply", "encode_status"),
    [(True, feed.Accepted, 400), (False, feed.Refused, 404)],  # 400: the proxy read the request
    ids=["accepted", "refused by an engine without encoders"],
)
async def test_a_router_reports_encoders_to_an_engine_that_uses_them(
    start: Any, router: Any, settings: Any, uses: bool, reply: type, encode_status: int
) -> None:
    one = await start(replace(settings, encodes_elsewhere=uses))
    (answer,) = await router.ask_raw(feed.encode(feed.EncoderAddresses(1, "r", (("e1", settings.pod_ip),))))
    assert (type(answer), answer.id) == (reply, 1)
    assert one.metric("encoders", state="up") == uses
    url = f"http://{settings.loopback}:8002/encoders/3/encode"
    assert (await fetch(url, "POST", data=b"{}"))[0] == encode_status


async def test_readiness_metrics_and_the_drain_hook(pair: Any, settings: Any, router: Any) -> None:
    one, engine = pair
    await engine.publish(batch(stored([1]), stored([], ids=[])))
    await applied(one, 1)
    base = f"http://{settings.pod_ip}:9090"
    for url in (f"{base}/healthz", f"{base}/readyz"):
        assert (await fetch(url))[0] == 200
    _, text = await fetch(f"{base}/metrics")
    assert "mmrouter_sidecar_blocks 1.0" in text
    assert 'mmrouter_sidecar_events_total{what="ignored_empty_store"} 1.0' in text
    assert (await fetch(f"http://{settings.loopback}:8002/drain"))[0] == 200
    await router.heartbeat(lambda beat: beat.draining)
    one.sidecar.ready.clear()
    assert (await fetch(f"{base}/readyz"))[0] == 503


async def test_an_address_in_use_ends_the_sidecar_with_an_error(start: Any, settings: Any) -> None:
    await start()
    with pytest.raises(AssertionError, match="address already in use"):
        await start(replace(settings, state_dir=settings.state_dir / "other"))


async def test_an_api_server_that_outlives_its_engine_does_not_make_it_look_alive(
    pair: Any, engines: Any, http_engine: Any, router: Any
) -> None:
    one, engine = pair
    await engine.publish(batch(stored([1])))
    await applied(one, 1)
    await router.heartbeat(lambda beat: beat.engine_state == "up")
    engine.kill()
    await router.heartbeat(lambda beat: beat.engine_state == "down")
    seen = len(router.frames)
    await router.until(lambda: len(router.frames) > seen + 5)
    assert {beat.engine_state for beat in router.frames[seen:] if isinstance(beat, feed.Heartbeat)} == {"down"}
    engines()
    await router.heartbeat(lambda beat: beat.engine_state == "up")
