"""Eligibility of workers, with and without overlap (docs/architecture.md), and what a booking counts."""

from array import array
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.router.rig import BLOCK, IDS, KEYS, SEED, Rig, deployment, prepared

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_router.fleet.rank_load import LoadColumns, PeerUsage, RankUsage
from mmrouter_router.fleet.workers import Member, Worker
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.placer import NoWorkerError, Placer
from mmrouter_router.scheduling.scoring import WEIGHTS

ENCODERS = {"name": "encoder", "role": "encoder", "replicas": 1, "accelerator": {"kind": "cpu"}}


def test_longest_prefix_holder_is_chosen_exactly():
    rig = Rig()
    rig.worker("a", KEYS[:2])
    rig.worker("b", KEYS)
    rig.worker("c")
    decision = rig.placer.place(prepared())
    assert (decision.target.worker.member.name, decision.choice.winner.overlap, decision.exactness) == ("b", 6, "exact")


def test_overlap_is_per_rank():
    rig = Rig()
    rig.worker("a", KEYS, ranks=2)
    decision = rig.placer.place(prepared())
    assert decision.target.rank == 1
    assert {s.candidate.id[-1]: s.candidate.overlap for s in decision.choice.scores} == {"0": 0, "1": 6}


@pytest.mark.parametrize(
    ("canary", "policy", "seconds", "standing", "gated"),
    [
        ("True", "Degrade", 0, "verified", "waiting"),
        ("True", "Degrade", 60, "verified", "verified"),
        ("True", "Refuse", 59, "verified", "waiting"),
        ("True", "Refuse", 60, "verified", "verified"),
        ("Unknown", "Degrade", 59, "pending", "pending"),
        ("Unknown", "Degrade", 60, "degraded", "degraded"),
        ("Unknown", "Refuse", 60, "refused", "refused"),
        ("False", "Degrade", 59, "degraded", "waiting"),
        ("False", "Degrade", 60, "degraded", "degraded"),
        ("False", "Refuse", 0, "refused", "refused"),
    ],
)
def test_eligibility_follows_canary_policy_gates_and_time(canary, policy, seconds, standing, gated):
    rig = Rig(onFailure=policy)
    workers = rig.worker("a", canary=canary), rig.worker("b", canary=canary, admitted=False)
    rig.clock.now += seconds
    assert tuple(map(rig.placer.eligibility, workers)) == (standing, gated)


def test_pending_worker_is_a_last_resort_without_exactness():
    rig = Rig()
    pending = rig.worker("a", KEYS, canary="")
    decision = rig.placer.place(prepared())
    assert decision.target.worker is pending
    assert (decision.exactness, decision.reasons) == ("affinity", ("unverified:worker",))
    verified = rig.worker("b")
    assert rig.placer.place(prepared()).target.worker is verified


def test_verified_worker_waits_for_its_readiness_gates():
    rig = Rig()
    new = rig.worker("new", KEYS, admitted=False)
    rig.worker("old")
    assert rig.placer.place(prepared()).target.worker.member.name == "old"
    assert rig.placer.place(prepared(), policy="roundRobin").target.worker.member.name == "old"
    rig.fleet.join(replace(new.member, admitted=True))
    decision = rig.placer.place(prepared())
    assert (decision.target.worker, decision.choice.winner.overlap, decision.exactness) == (new, 6, "exact")


def test_closed_gates_are_ignored_after_the_timeout():
    rig = Rig()
    new = rig.worker("new", KEYS, admitted=False)
    rig.clock.now += 1
    rig.worker("old")
    assert rig.placer.place(prepared()).target.worker.member.name == "old"
    rig.clock.now += 59
    assert rig.placer.place(prepared()).target.worker is new


def test_last_resort_keeps_overlap_of_verified_workers_only():
    rig = Rig()
    rig.worker("new", KEYS, admitted=False)
    decision = rig.placer.place(prepared())
    assert (decision.choice.winner.overlap, decision.exactness) == (6, "exact")
    rig = Rig()
    rig.worker("other", KEYS, canary="False", admitted=False)
    assert rig.placer.place(prepared()).reasons == ("unverified:worker",)


@pytest.mark.parametrize("values", [{"engine_state": "down"}, {"engine_state": "starting"}, {"draining": True}])
def test_down_or_draining_engine_is_no_candidate(values):
    rig = Rig()
    rig.worker("a", KEYS, **values)
    with pytest.raises(NoWorkerError, match="a unsynced"):
        rig.placer.place(prepared())


def test_new_epoch_drops_cache_and_canary():
    rig = Rig()
    worker = rig.worker("a", KEYS)
    rig.beat(worker, canary="", epoch=2)
    assert rig.placer.eligibility(worker) == "unsynced"
    rig.sync(worker, (), epoch=2)
    rig.beat(worker, canary="", epoch=2)
    assert rig.placer.eligibility(worker) == "pending"
    assert rig.placer.place(prepared()).choice.winner.overlap == 0


def test_silent_feed_removes_the_worker():
    rig = Rig()
    worker = rig.worker("a", KEYS)
    rig.fleet.mark_stale(worker)
    assert rig.placer.eligibility(worker) == "unsynced"


def test_silent_feed_serves_as_last_resort_without_overlap():
    rig = Rig()
    silent = rig.worker("a", KEYS)
    rig.fleet.mark_stale(silent)
    decision = rig.placer.place(prepared())
    assert (decision.target.worker, decision.exactness) == (silent, "affinity")
    assert not decision.choice.winner.scored
    other = rig.worker("b")
    assert rig.placer.place(prepared()).target.worker is other


def test_only_device_memory_of_the_indexed_group_counts():
    rig = Rig()
    worker = rig.worker("a")
    for group, medium in ((0, "CPU"), (1, "GPU"), (0, "GPU")):
        delta = feed.Delta(1, worker.sync.seq + 1, 0.0, 0, group, medium, pack_keys(KEYS[:3]), b"")
        rig.fleet.on_published(worker, delta)
        expected = 3 if (group, medium) == (0, "GPU") else 0
        assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == expected


WINDOW = {"groups": (feed.CacheGroup(0, "sliding_window", 2 * BLOCK + 1),)}
FULL_SECOND = {"groups": (feed.CacheGroup(0, "sliding_window", 64), feed.CacheGroup(1, "full_attention"))}


def test_window_group_hits_after_dropped_blocks():
    rig = Rig()
    rig.worker("a", KEYS[2:4], **WINDOW)
    rig.worker("b", KEYS[:3])
    scores = {s.candidate.name: s.candidate.overlap for s in rig.placer.place(prepared()).choice.scores}
    assert scores == {"a": 4, "b": 3}


def test_block_with_the_last_token_is_not_hit_by_a_window():
    rig = Rig()
    ids = IDS[: 4 * BLOCK]
    rig.worker("a", KEYS[2:4], **WINDOW)
    assert rig.placer.place(prepared(ids=ids)).choice.winner.overlap == 0
    longer = rig.placer.place(prepared(ids=IDS[: 4 * BLOCK + 1]))
    assert longer.choice.winner.overlap == 4


def test_case_45_full_attention_group_decides_in_any_position():
    """Once the groups are known, the keys of the other group are computed again."""
    rig = Rig()
    worker = rig.worker("a")
    delta = feed.Delta(1, 1, 0.0, 0, 1, "GPU", pack_keys(KEYS[:3]), b"")
    other = feed.Delta(1, 2, 0.0, 0, 0, "GPU", pack_keys(KEYS), b"")
    rig.fleet.on_published(worker, delta)
    rig.fleet.on_published(worker, other)
    assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == 6
    rig.beat(worker, **FULL_SECOND)
    assert rig.placer.eligibility(worker) == "unsynced"
    asked = worker.sync.request_id
    for group, keys, last in ((0, KEYS, False), (1, KEYS[:3], True)):
        part = feed.SnapshotPart(asked, worker.id, 1, 2, 0, group, "GPU", pack_keys(keys), last)
        rig.fleet.on_reply(worker, part)
    assert rig.placer.eligibility(worker) == "verified"
    assert rig.placer.place(prepared()).choice.winner.overlap == 3
    rig.fleet.on_published(worker, feed.Delta(1, 3, 0.0, 0, 1, "GPU", pack_keys(KEYS[3:4]), b""))
    assert rig.placer.place(prepared()).choice.winner.overlap == 4
    assert worker.delta_event.is_set()


def test_groups_before_the_snapshot_need_no_second_one():
    rig = Rig()
    worker = rig.fleet.join(Member("uid-a", "a", "127.0.0.1", "worker", "worker"))
    rig.fleet.feed_connected(worker)
    rig.beat(worker, **FULL_SECOND)
    asked = worker.sync.request_id
    part = feed.SnapshotPart(asked, worker.id, 1, 0, 0, 1, "GPU", pack_keys(KEYS[:2]), True)
    rig.fleet.on_reply(worker, part)
    rig.beat(worker, **FULL_SECOND)
    assert worker.sync.synced
    assert rig.placer.place(prepared()).choice.winner.overlap == 2


def test_case_49_cleared_rank_and_removed_worker():
    rig = Rig()
    worker = rig.worker("a", KEYS[:2], ranks=2)
    for seq, rank in ((1, 0), (2, 1)):
        rig.fleet.on_published(worker, feed.Delta(1, seq, 0.0, rank, 0, "GPU", pack_keys(KEYS[:4]), b""))
    rig.fleet.on_published(worker, feed.Delta(1, 3, 0.0, 1, 0, "GPU", b"", b"", True))
    scores = {s.candidate.id[-1]: s.candidate.overlap for s in rig.placer.place(prepared()).choice.scores}
    assert scores == {"0": 4, "1": 0}
    rig.fleet.leave("uid-a")
    while rig.fleet.index.sweep():
        pass
    assert len(rig.fleet.index) == 0


def test_keys_depend_on_the_scope():
    """Two SGLang releases make different sentinels of an image; vLLM workers share one prompt."""
    rig = Rig()
    asked = []

    class Spied(Prepared):
        def keys(self, block_size, scope=None):
            asked.append((block_size, scope))
            return super().keys(block_size)

    for name, version in (("a", "0.5.23"), ("b", "0.5.23"), ("c", "0.5.24")):
        rig.worker(name, KEYS[:1], engine="sglang", engine_version=version)
    rig.worker("d")
    rig.placer.place(Spied(**vars(prepared())))
    assert len(asked) == len(set(asked)) == 3
    assert {scope[0][:6] if scope else None for _, scope in asked} == {"0.5.23", "0.5.24", None}


def test_booking_releases_prefill_at_first_byte_and_blocks_at_end():
    rig = Rig()
    worker = rig.worker("a", KEYS[:2])
    booking = rig.placer.begin(rig.placer.place(prepared()))
    usage = worker.usage[0]
    assert (usage.requests, usage.prefill, usage.active) == (1, 4, 6)
    booking.answered()
    assert (usage.requests, usage.prefill, usage.active) == (1, 0, 6)
    booking.end()
    booking.end()
    assert (usage.requests, usage.prefill, usage.active) == (0, 0, 0)


def announce(rig: Rig, worker: Worker, keys) -> None:
    delta = feed.Delta(1, worker.sync.seq + 1, 0.0, 0, 0, "GPU", pack_keys(keys), b"")
    rig.fleet.on_published(worker, delta)


def test_second_request_follows_promised_blocks():
    """The holder of a block has less work with the prompt than an idle engine, before any event."""
    rig = Rig()
    for name in "abc":
        rig.worker(name)
    first = rig.placer.place(prepared())
    booking = rig.placer.begin(first)
    second = rig.placer.place(prepared())
    winner = second.choice.winner
    assert (winner.name, winner.overlap, winner.coming) == (first.choice.winner.name, 0, 6)
    booking.end()
    assert rig.placer.place(prepared()).choice.winner.coming == 0


def test_stored_blocks_leave_the_queue_once():
    rig = Rig()
    worker = rig.worker("a")
    bookings = [rig.placer.begin(rig.placer.place(prepared())) for _ in range(3)]
    usage = worker.usage[0]
    assert (usage.requests, usage.prefill, usage.active) == (3, 6, 18)
    announce(rig, worker, KEYS[:4])
    winner = rig.placer.place(prepared()).choice.winner
    assert (usage.prefill, winner.overlap, winner.coming, winner.prefill) == (2, 4, 2, 2)
    for booking in bookings:
        booking.answered()
    assert (usage.prefill, usage.active) == (0, 18)
    for booking in bookings:
        booking.end()
    assert (usage.requests, usage.prefill, usage.active) == (0, 0, 0)


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(["begin", "told", "answered", "end", "epoch"]), st.integers(0, 6)), max_size=25)
)
def test_queue_is_never_negative_and_ends_empty(steps):
    rig = Rig()
    worker, other = rig.worker("a"), rig.worker("b")
    bookings, epoch = [], 1
    for what, number in steps:
        if what == "begin":
            bookings.append(rig.placer.begin(rig.placer.place(prepared(ids=IDS[: BLOCK * number + 1]))))
        elif what == "told":
            announce(rig, worker, KEYS[:number])
        elif what == "epoch":
            epoch += 1
            rig.beat(worker, epoch=epoch)
            rig.sync(worker, (), epoch=epoch)
            rig.beat(worker, epoch=epoch)
        elif bookings:
            booking = bookings[number % len(bookings)]
            booking.answered() if what == "answered" else booking.end()
        for each in (*worker.usage.values(), *other.usage.values()):
            assert each.prefill >= 0
            assert each.requests >= 0
    for booking in bookings:
        booking.end()
    for each in (*worker.usage.values(), *other.usage.values()):
        assert (each.requests, each.prefill, each.encode, each.active) == (0, 0, 0, 0)


IMAGE = Span(BLOCK, 3 * BLOCK, bytes(32))


def test_partly_hit_image_is_encoded_whole():
    rig = Rig()
    keys = block_keys(IDS, BLOCK, (IMAGE,), SEED)
    rig.worker("part", keys[:3])
    rig.worker("whole", keys[:4])
    rig.worker("none")
    request = replace(prepared(), spans=(IMAGE,))
    scores = {s.candidate.name: s.candidate.encode for s in rig.placer.place(request).choice.scores}
    image = 3 * WEIGHTS.visual
    assert scores == {"whole": 0.0, "part": pytest.approx(image), "none": pytest.approx(image)}


def test_encoding_counts_as_queue_until_the_first_byte():
    rig = Rig()
    worker = rig.worker("a")
    booking = rig.placer.begin(rig.placer.place(replace(prepared(), spans=(IMAGE,))))
    usage = worker.usage[0]
    assert usage.prefill == pytest.approx(6 + 3 * WEIGHTS.visual)
    announce(rig, worker, block_keys(IDS, BLOCK, (IMAGE,), SEED))
    assert usage.prefill == pytest.approx(3 * WEIGHTS.visual)
    booking.answered()
    assert usage.prefill == 0


def test_with_encoders_an_engine_encodes_nothing():
    rig = Rig()
    placer = Placer(deployment(ENCODERS), rig.fleet)
    rig.worker("a")
    assert placer.place(replace(prepared(), spans=(IMAGE,))).choice.winner.encode == 0


def test_unpredicted_request_uses_consistent_hash():
    rig = Rig()
    rig.worker("a", KEYS)
    rig.worker("b")
    request = replace(prepared("affinity", array("I")), reasons=("field:unknown",))
    decision = rig.placer.place(request)
    assert (decision.policy, decision.exactness, decision.reasons) == ("consistentHash", "affinity", ("field:unknown",))


def test_each_block_size_uses_its_own_keys():
    rig = Rig()
    rig.worker("a", KEYS)
    rig.worker("b", block_keys(IDS, 32, (), SEED), block_size=32)
    scores = {s.candidate.name: s.candidate for s in rig.placer.place(prepared()).choice.scores}
    assert (scores["a"].overlap, scores["a"].blocks) == (6, 6)
    assert (scores["b"].overlap, scores["b"].blocks) == (3, 3)


def test_excluded_workers_are_skipped():
    rig = Rig()
    rig.worker("a", KEYS)
    rig.worker("b")
    assert rig.placer.place(prepared(), exclude={"uid-a"}).target.worker.member.name == "b"
    with pytest.raises(NoWorkerError):
        rig.placer.place(prepared(), exclude={"uid-a", "uid-b"})


HAPPENINGS = [
    *("canary", "down", "drain", "epoch", "silence", "sync", "delta", "gap", "clear", "load"),
    *("leave", "join", "move", "time", "window", "ranks", "connect"),
]


def happen(rig: Rig, what: str, worker: Worker, number: int) -> None:
    """Let something happen to a worker, as its feed or discovery would tell it."""
    follower, name = worker.sync, worker.member.name
    match what:
        case "canary":
            rig.beat(worker, ("True", "False", "Unknown")[number % 3], epoch=follower.epoch)
        case "down":
            rig.beat(worker, epoch=follower.epoch, engine_state="down")
        case "drain":
            rig.fleet.join(replace(worker.member, draining=number % 2 == 0))
        case "epoch":
            rig.beat(worker, epoch=follower.epoch + 1)
        case "silence":
            rig.fleet.mark_stale(worker)
        case "connect":
            rig.fleet.feed_connected(worker)
        case "sync":
            rig.fleet.feed_connected(worker)
            rig.sync(worker, KEYS[:number], epoch=follower.epoch)
        case "delta" | "gap" | "clear":
            seq = follower.seq + (2 if what == "gap" else 1)
            stored = pack_keys(KEYS[:number])
            rig.fleet.on_published(
                worker, feed.Delta(follower.epoch, seq, 0.0, 0, 0, "GPU", stored, b"", what == "clear")
            )
        case "load":
            rig.fleet.on_published(worker, feed.LoadReport(0, 1.0, float(number), 0.5))
        case "leave":
            rig.fleet.leave(worker.member.uid)
        case "join":
            rig.worker(name, KEYS[:number])
        case "move":
            rig.fleet.join(replace(worker.member, compatibility=str(number)))
        case "time":
            rig.clock.now += 10 * number
        case "window":
            rig.beat(worker, epoch=follower.epoch, **(WINDOW if number % 2 else {}))
        case "ranks":
            rig.beat(worker, epoch=follower.epoch, ranks=1 + number % 2)


def decided(placer: Placer) -> object:
    try:
        decision = placer.place(prepared(), dry_run=True)
    except NoWorkerError as error:
        return str(error)
    return decision.target, decision.choice.scores, decision.exactness, decision.reasons


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(HAPPENINGS), st.integers(0, 2), st.integers(0, 6)), max_size=12))
def test_cached_groups_decide_as_fresh_ones(steps):
    rig = Rig()
    workers = [rig.worker("a", KEYS[:2]), rig.worker("b", KEYS), rig.worker("c", canary="")]
    decided(rig.placer)
    for what, number, value in steps:
        happen(rig, what, workers[number], value)
        assert decided(rig.placer) == decided(Placer(deployment(), rig.fleet))


def columns(rig: Rig):
    """Yield the loads in a decision's columns, and those of the ranks' usages, for each group."""
    for group in rig.placer.groups((), frozenset({"worker"}), None):
        table = group.table(KEYS, len(IDS), (), 0.0)
        unanswered = group.loads(rig.fleet.loads.unanswered)
        waiting = table.waiting or [0.0] * len(table)
        seen = list(zip(unanswered, table.prefill, table.active, waiting, strict=True))
        usages = [target.worker.usage[target.rank] for target in group.targets]
        yield (
            seen,
            [
                (u.unanswered, u.prefill + u.peer_prefill, u.active + u.peer_active, u.others * len(KEYS))
                for u in usages
            ],
        )


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["begin", "answered", "end", "told", "load", "theirs", "leave", "join", "epoch", "ranks"]),
            st.integers(0, 3),
            st.integers(0, 6),
        ),
        max_size=30,
    )
)
def test_load_columns_match_rank_usages(steps):
    rig, bookings = Rig(), []
    workers = [rig.worker(name) for name in "abcd"]
    for what, number, value in steps:
        worker = workers[number]
        if what == "begin":
            with suppress(NoWorkerError):
                bookings.append(rig.placer.begin(rig.placer.place(prepared(ids=IDS[: BLOCK * value + 1]))))
        elif what in ("answered", "end"):
            for booking in bookings[:value]:
                getattr(booking, what)()
        elif what == "told":
            announce(rig, worker, KEYS[:value])
        elif what == "theirs":
            usage = worker.usage.get(0) or RankUsage(LoadColumns())
            usage.peers["other"] = PeerUsage(value, value / 2, 3.0 * value, 0.0)
            usage.sum_peers()
        elif what == "join":
            workers[number] = rig.worker(worker.member.name)
        elif worker.member.uid in rig.fleet.workers:
            happen(rig, what, worker, value)
        with suppress(NoWorkerError):
            assert all(seen == said for seen, said in columns(rig))
    # No two ranks share a row, and an unused row is empty for the next rank.
    rows = [usage.row for worker in rig.fleet for usage in worker.usage.values()]
    assert len(set(rows)) == len(rows)
    free = set(range(len(rig.fleet.loads.active))) - set(rows)
    assert not any(rig.fleet.loads.active[row] or rig.fleet.loads.unanswered[row] for row in free)
