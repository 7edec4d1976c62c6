"""What a booking counts, and that decisions of cached groups and load columns are those of fresh ones."""

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import examples
from unit.router.rig import BLOCK, IDS, KEYS, SEED, Rig, deployment, prepared
from unit.router.test_placer import IMAGE, WINDOW

from mmrouter_lib import feed
from mmrouter_lib.block_keys import block_keys
from mmrouter_router.fleet.rank_load import LoadColumns, PeerUsage, RankUsage
from mmrouter_router.fleet.workers import Worker
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.scheduling.scoring import WEIGHTS

LOADS = ["begin", "answered", "end", "told", "load", "theirs", "leave", "join", "epoch", "ranks"]


@pytest.fixture
def rig():
    return Rig()


def test_booking_releases_prefill_at_first_byte_and_blocks_at_end(rig):
    worker = rig.worker("a", KEYS[:2])
    booking = rig.placer.begin(rig.placer.place(prepared()))
    usage = worker.usage[0]
    assert (usage.requests, usage.prefill, usage.active) == (1, 4, 6)
    booking.answered()
    assert (usage.requests, usage.prefill, usage.active) == (1, 0, 6)
    booking.end()
    booking.end()
    assert (usage.requests, usage.prefill, usage.active) == (0, 0, 0)


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


def test_stored_blocks_leave_the_queue_once(rig):
    worker = rig.worker("a")
    bookings = [rig.placer.begin(rig.placer.place(prepared())) for _ in range(3)]
    usage = worker.usage[0]
    assert (usage.requests, usage.prefill, usage.active) == (3, 6, 18)
    rig.delta(worker, KEYS[:4])
    winner = rig.placer.place(prepared()).choice.winner
    assert (usage.prefill, winner.overlap, winner.coming, winner.prefill) == (2, 4, 2, 2)
    for booking in bookings:
        booking.answered()
    assert (usage.prefill, usage.active) == (0, 18)
    for booking in bookings:
        booking.end()
    assert (usage.requests, usage.prefill, usage.active) == (0, 0, 0)


@settings(max_examples=examples(40))
@given(st.lists(st.tuples(st.sampled_from([*LOADS[:4], "epoch"]), st.integers(0, 6)), max_size=25))
def test_queue_is_never_negative_and_ends_empty(steps):
    rig = Rig()
    worker, other = rig.worker("a"), rig.worker("b")
    bookings, epoch = [], 1
    for what, number in steps:
        if what == "begin":
            bookings.append(rig.placer.begin(rig.placer.place(prepared(ids=IDS[: BLOCK * number + 1]))))
        elif what == "told":
            rig.delta(worker, KEYS[:number])
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


def test_encoding_counts_as_queue_until_the_first_byte(rig):
    worker = rig.worker("a")
    booking = rig.placer.begin(rig.placer.place(replace(prepared(), spans=(IMAGE,))))
    usage = worker.usage[0]
    assert usage.prefill == pytest.approx(6 + 3 * WEIGHTS.visual)
    rig.delta(worker, block_keys(IDS, BLOCK, (IMAGE,), SEED))
    assert usage.prefill == pytest.approx(3 * WEIGHTS.visual)
    booking.answered()
    assert usage.prefill == 0


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
            rig.delta(worker, KEYS[:number], skipped=what == "gap", cleared=what == "clear")
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


@settings(max_examples=examples(60))
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
        loads = [(u.unanswered, u.prefill + u.peer_prefill, u.active + u.peer_active, u.others) for u in usages]
        yield seen, [(*load, others * len(KEYS)) for *load, others in loads]


@settings(max_examples=examples(60))
@given(st.lists(st.tuples(st.sampled_from(LOADS), st.integers(0, 3), st.integers(0, 6)), max_size=30))
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
            rig.delta(worker, KEYS[:value])
        elif what == "theirs":
            usage = worker.usage.get(0) or RankUsage(LoadColumns())
            usage.peers["other"] = PeerUsage(value, value / 2, 3.0 * value, 0.0)
            usage.sum_peers()
        elif what == "join":
            workers[number] = rig.worker(worker.member.name)
        elif worker.member.uid in rig.fleet.workers:
            happen(rig, what, worker, value)
        with suppress(NoWorkerError):
            assert all(seen == expected for seen, expected in columns(rig))
    # No two ranks share a row, and an unused row is empty for the next rank.
    rows = [usage.row for worker in rig.fleet for usage in worker.usage.values()]
    assert len(set(rows)) == len(rows)
    free = set(range(len(rig.fleet.loads.active))) - set(rows)
    assert not any(rig.fleet.loads.active[row] or rig.fleet.loads.unanswered[row] for row in free)
