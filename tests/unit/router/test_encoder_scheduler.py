"""The encoder scheduler does what its modes say, and loses nothing when encoders come, go, fail and stall."""

from types import SimpleNamespace

import pytest

from mmrouter_router.core.linear_cost import Line
from mmrouter_router.encoding.encoder_queue import STALL_COLD, STALL_FACTOR, Encoder, Image
from mmrouter_router.encoding.scheduler import ATTEMPTS, PATIENCE, EncoderScheduler

SPEEDS = {"fast": 8000.0, "middle": 3000.0, "slow": 1000.0}
"""Visual tokens per second by kind, which is also the id where there is one of a kind."""


def speed(kind: str) -> Line:
    return Line(0.0, 1 / SPEEDS[kind])


def machine(mode="auto", *kinds, **bounds):
    encoders = EncoderScheduler(mode, first=speed)
    for kind in kinds or ("fast", "middle", "slow"):
        encoders.join(Encoder(kind, kind, **bounds), 0.0)
    return encoders


def weighted(mode, **weights):
    """Encoders of one speed with these weights, joining in this order."""
    encoders = EncoderScheduler(mode, first=lambda kind: Line(0.0, 0.001))
    for name, weight in weights.items():
        encoders.join(Encoder(name, "x", weight=weight), 0.0)
    return encoders


def image(name, tokens=800, size=10):
    return Image(str(name).encode(), tokens, size)


def images(names, tokens=800):
    return [image(name, tokens) for name in names]


def view(encoders, name, now=0.0):
    queue = encoders.queues[name]
    counts = {"waiting": len(queue.waiting), "running": len(queue.running), "measured": queue.rate.measured}
    until = queue.backoff_until if now < queue.backoff_until else None
    held = {"held": len(queue.held), "held_bytes": queue.held.bytes}
    return SimpleNamespace(**counts, **held, rate=1 / queue.rate.line.per_token, backoff_until=until)


def states(encoders, now=0.0):
    return {
        queue.id: (list(queue.waiting), list(queue.running), queue.free_at(now)) for queue in encoders.queues.values()
    }


def where(outcome):
    return [placed.encoder for placed in outcome.placed]


def finish(placed):
    """The estimated finish of a queued image at its encoder."""
    return dict(placed.weighed)[placed.encoder]


def finish_all(encoders, outcome, now, value=None):
    """Finish whatever is started until nothing runs; return all requests that became ready, in their order."""
    ready, runs = dict(outcome.ready), list(outcome.starts)
    while runs:
        done = encoders.finished(runs.pop(0).run, now, value)
        ready |= done.ready
        runs += done.starts
    return ready


def test_image_goes_to_the_earliest_estimated_finish():
    encoders = machine()
    chosen = [encoders.place(f"r{n}", [image(n)], 0.0).placed[0] for n in range(4)]
    # 0.1, 0.2 and then 0.27 s on the second encoder before 0.3 s on the first
    assert [placed.encoder for placed in chosen] == ["fast", "fast", "middle", "fast"]
    assert [round(finish(placed), 3) for placed in chosen] == [0.1, 0.2, 0.267, 0.3]
    assert dict(chosen[0].weighed) == pytest.approx({"fast": 0.1, "middle": 0.267, "slow": 0.8}, abs=0.001)


def test_images_are_spread_if_the_request_finishes_earlier():
    outcome = machine().place("r", images("abcd"), 0.0)
    assert sorted(where(outcome)) == ["fast", "fast", "fast", "middle"]
    assert max(finish(placed) for placed in outcome.placed) == pytest.approx(0.3)


def test_small_image_takes_the_slow_encoder_if_it_does_not_delay_the_request():
    outcome = machine().place("r", [image("large", 8000), image("small", 500)], 0.0)
    assert where(outcome) == ["fast", "slow"]  # 0.5 s there is before the 1 s that the large one takes anyway


def test_waiting_image_moves_to_an_encoder_that_finishes_early():
    encoders = machine("auto", "fast", "slow")
    first = encoders.place("a", [image("a", 80_000)], 0.0)
    second = encoders.place("b", [image("b", 8000)], 0.0)
    third = encoders.place("c", [image("c", 8000)], 0.0)
    assert [where(o) for o in (first, second, third)] == [["fast"], ["slow"], ["fast"]]
    fourth = encoders.place("d", [image("d", 1000)], 0.0)
    assert where(fourth) == ["slow"]
    outcome = encoders.finished(first.starts[0].run, 1.0)  # 10 s were estimated
    assert outcome.moved >= 1
    assert view(encoders, "slow", 1.0).waiting == 0


def test_waiting_image_leaves_a_slow_encoder():
    encoders = machine("auto", "fast", "slow")
    runs = [start.run for n in range(6) for start in encoders.place(f"r{n}", [image(n)], 0.0).starts]
    assert view(encoders, "slow").running == 0
    assert view(encoders, "fast").waiting == 5
    outcome = encoders.finished(runs[0], 1.2)  # 0.1 s were estimated: the rate is 12 times lower
    assert outcome.moved >= 1
    assert view(encoders, "slow", 1.2).running == 1


def test_new_encoder_takes_work_and_inherits_its_kinds_estimate():
    encoders = machine("auto", "fast")
    started = encoders.place("r", images(range(20)), 0.0).starts
    encoders.finished(started[0].run, 0.05)
    outcome = encoders.join(Encoder("fast-2", "fast"), 0.05)
    assert [start.encoder for start in outcome.starts] == ["fast-2"]
    assert outcome.moved > 1
    assert view(encoders, "fast-2").rate == view(encoders, "fast").rate == pytest.approx(16_000)
    assert view(encoders, "fast-2").measured == 0


def test_small_request_passes_a_large_one_for_a_bounded_time():
    encoders = machine("auto", "fast")
    encoders.place("running", [image("x")], 0.0)
    large = encoders.place("large", images(range(10)), 0.0)
    small = encoders.place("small", [image("s")], 0.01)
    assert finish(small.placed[0]) < min(finish(placed) for placed in large.placed) + 0.01
    patience = PATIENCE * 10 * 0.1  # seconds that 10 images take here
    late = encoders.place("late", [image("l")], patience + 0.02)
    assert finish(late.placed[0]) > max(finish(placed) for placed in large.placed)


def test_equal_finishes_go_to_the_smallest_id():
    for order in ("abc", "cba", "bca"):
        encoders = weighted("auto", **dict.fromkeys(order, 1))
        chosen = [where(encoders.place(f"r{n}", [image(n)], 0.0))[0] for n in range(6)]
        assert chosen == list("abcabc")


def test_weights_eight_to_one_over_18_requests():
    encoders = weighted("perRequest", a=8, b=1)
    chosen = [set(where(encoders.place(f"r{n}", images(f"{n}{part}" for part in "xyz"), 0.0))) for n in range(18)]
    assert all(len(names) == 1 for names in chosen)
    counted = [names.pop() for names in chosen]
    assert (counted.count("a"), counted.count("b")) == (16, 2)
    assert counted.index("b") not in (0, 8)  # smooth: in the middle of its round


def test_per_image_mode_takes_turns_by_image_and_shares_by_weight():
    outcome = machine("perImage").place("r", images(range(6)), 0.0)
    assert where(outcome) == ["fast", "middle", "slow"] * 2
    encoders = weighted("perImage", a=5, b=3, c=2, d=0)
    chosen = [where(encoders.place(f"r{n}", [image(n)], 0.0))[0] for n in range(100)]
    assert [chosen.count(name) for name in "abcd"] == [50, 30, 20, 0]


@pytest.mark.parametrize("mode", ["perImage", "perRequest"])
def test_last_encoder_gets_all_images_with_any_weight(mode):
    encoders = weighted(mode, a=9, b=0)
    encoders.leave("a", 0.0)
    assert where(encoders.place("r", images("uvw"), 0.0)) == ["b"] * 3


def test_request_larger_than_each_queue_is_refused_per_request_only():
    per_request = machine("perRequest", queue=2)  # 3 places each, the slot included
    assert per_request.place("r", images(range(4)), 0.0).full
    assert len(machine("perImage", queue=2).place("r", images(range(4)), 0.0).placed) == 4


def test_held_embedding_skips_the_encoder():
    encoders = machine("auto", "fast", cache_entries=2)
    for name in "ab":
        finish_all(encoders, encoders.place(name, [image(name)], 0.0), 1.0, f"answer {name}")
    hit = encoders.place("again", [image("a")], 2.0)
    assert (hit.starts, hit.placed[0].how) == ([], "held")
    assert hit.ready == {"again": ("answer a",)}
    finish_all(encoders, encoders.place("c", [image("c")], 3.0), 3.0)
    assert encoders.place("a again", [image("a")], 4.0).ready  # used last, so b went
    assert encoders.place("b again", [image("b")], 4.0).starts
    assert view(encoders, "fast").held == 2


def test_cache_model_is_bounded_in_bytes():
    encoders = machine("auto", "fast", cache_bytes=25)
    for name in "abc":
        finish_all(encoders, encoders.place(name, [image(name, size=10)], 0.0), 1.0)
    finish_all(encoders, encoders.place("huge", [image("huge", size=26)], 0.0), 1.0)
    assert (view(encoders, "fast").held, view(encoders, "fast").held_bytes) == (2, 20)


def test_image_in_flight_is_joined():
    encoders = machine()
    first = encoders.place("a", [image("x"), image("x")], 0.0)
    second = encoders.place("b", [image("x")], 0.05)
    assert len(first.starts) == 1
    assert (second.starts, second.placed[0].how) == ([], "joined")
    ready = encoders.finished(first.starts[0].run, 0.1, "v").ready
    assert list(ready.items()) == [("a", ("v", "v")), ("b", ("v",))]


def test_answers_keep_the_order_of_the_images():
    encoders = machine("perImage")
    outcome = encoders.place("r", images("abc"), 0.0)
    ready = [encoders.finished(start.run, 1.0, start.image.key).ready for start in reversed(outcome.starts)]
    assert ready == [{}, {}, {"r": (b"a", b"b", b"c")}]
    assert encoders.place("without images", [], 0.0).ready == {"without images": ()}


def test_full_queues_refuse_the_whole_request():
    encoders = machine("auto", "fast", "slow", queue=1)
    encoders.place("a", images("wxyz"), 0.0)
    before = states(encoders)
    assert encoders.place("b", [image("b")], 0.0).full
    assert encoders.place("c", images(range(5)), 0.0).full
    assert states(encoders) == before
    assert encoders.place("d", [image("w")], 0.0).placed[0].how == "joined"  # needs no room


def test_duplicate_requests_and_inconsistent_images_are_refused():
    encoders = machine()
    encoders.place("r", [image("a")], 0.0)
    with pytest.raises(ValueError, match="is being encoded"):
        encoders.place("r", [image("b")], 0.0)
    with pytest.raises(ValueError, match="differ"):
        encoders.place("s", [image("c", 4), image("c", 5)], 0.0)


def test_shared_image_outlives_a_cancelled_request():
    encoders = machine("auto", "fast")
    run = encoders.place("a", [image("x")], 0.0).starts[0].run
    encoders.place("b", [image("x")], 0.0)
    assert not encoders.cancel("a", 0.0).aborts
    assert set(encoders.finished(run, 0.1).ready) == {"b"}


def test_leaving_encoder_finishes_running_work_only():
    encoders = machine("auto", "fast", "slow")
    outcome = encoders.place("r", images(range(4)), 0.0)
    assert set(where(outcome)) == {"fast"}
    left = encoders.leave("fast", 0.01)
    assert (left.moved, left.aborts, [s.encoder for s in left.starts]) == (3, [], ["slow"])
    with pytest.raises(ValueError, match="another id"):
        encoders.join(Encoder("fast", "fast"), 0.02)
    encoders.finished(outcome.starts[0].run, 0.1)
    assert list(encoders.queues) == ["slow"]
    assert list(finish_all(encoders, left, 5.0)) == ["r"]


def test_requests_fail_when_the_last_encoder_leaves():
    encoders = machine("auto", "fast")
    outcome = encoders.place("a", [image("x")], 0.0)
    encoders.place("b", images("yz"), 0.0)
    assert encoders.leave("fast", 0.0).failed == {"b": "no_encoder"}
    assert list(encoders.finished(outcome.starts[0].run, 0.1).ready) == ["a"]
    assert encoders.queues == {}


def test_failed_image_is_retried_elsewhere_and_the_encoder_backs_off():
    encoders = machine("auto", "fast", "slow")
    run = encoders.place("r", [image("a")], 0.0).starts[0].run
    outcome = encoders.failed(run, 0.01)
    assert [start.encoder for start in outcome.starts] == ["slow"]
    until = view(encoders, "fast", 0.01).backoff_until
    assert until == pytest.approx(1.01)
    assert where(encoders.place("s", [image("b")], 0.5)) == ["slow"]
    probe = encoders.place("t", images("cd"), 9.0)
    assert sorted(where(probe)) == ["fast", "slow"]  # one to see
    encoders.finished(next(s.run for s in probe.starts if s.encoder == "fast"), 9.1)
    assert set(where(encoders.place("u", images("ef"), 9.2))) == {"fast"}


def test_image_that_fails_everywhere_fails_its_requests():
    encoders = machine(slots=2)
    runs = [s.run for s in encoders.place("r", [image("a"), image("b", 9000)], 0.0).starts if s.image.key == b"a"]
    for _ in range(ATTEMPTS):
        outcome = encoders.failed(runs[-1], 0.0)
        runs += [s.run for s in outcome.starts if s.image.key == b"a"]
    assert outcome.failed == {"r": "attempts"}
    assert len(set(runs)) == ATTEMPTS
    assert not any(queue.waiting or queue.running for queue in encoders.queues.values())


def test_refused_image_fails_its_requests_without_backoff():
    encoders = machine("auto", "fast")
    run = encoders.place("r", images("ab"), 0.0).starts[0].run
    outcome = encoders.failed(run, 0.1, refused=True)
    assert outcome.failed == {"r": "image_refused"}
    assert view(encoders, "fast").backoff_until is None
    assert view(encoders, "fast").waiting == view(encoders, "fast").running == 0


def test_a_second_image_does_not_make_an_overdue_encoder_look_free():
    encoders = machine("auto", "slow", slots=2)
    encoders.place("r1", [image("a", 1000)], 0.0)  # 1 s is estimated
    before = encoders.queues["slow"].free_at(3.0)
    encoders.place("r2", [image("b", 2500)], 3.0)  # 3.5 s are estimated for both, 3 of which are over
    assert encoders.queues["slow"].free_at(3.0) >= before > 3.0


def test_stalled_encoder_loses_its_work_and_estimate():
    encoders = machine("auto", "fast", "slow")
    run = encoders.place("r", [image("warm", 8000)], 0.0).starts[0].run
    encoders.finished(run, 1.0)
    outcome = encoders.place("r", images(range(4), 8000), 1.0)
    stuck = [start.run for start in outcome.starts if start.encoder == "fast"]
    at = encoders.next_tick(1.0)
    assert at == pytest.approx(1.0 + STALL_FACTOR * 1.0)
    assert encoders.tick(at - 0.01).aborts == []
    outcome = encoders.tick(at)
    assert outcome.aborts == [stuck[0]]
    assert view(encoders, "fast", at).waiting == view(encoders, "fast", at).running == 0
    assert view(encoders, "fast", at).backoff_until > at
    assert list(finish_all(encoders, outcome, at + 1)) == ["r"]


def test_last_encoder_keeps_its_work_when_stalled():
    encoders = machine("auto", "fast")
    run = encoders.place("r", [image("a")], 0.0).starts[0].run
    assert encoders.tick(STALL_COLD).aborts == []
    assert encoders.next_tick(STALL_COLD) > STALL_COLD
    assert encoders.finished(run, 500.0).ready


def test_failed_encoder_is_retried_with_growing_backoff():
    encoders = machine("auto", "fast", "slow")
    for number in range(3):  # each time it has its one image to see, and fails on it
        at = 100.0 * number
        (start,) = encoders.place(f"r{number}", [image(number)], at).starts
        assert start.encoder == "fast"
        encoders.failed(start.run, at)
        assert where(encoders.place(f"s{number}", [image(f"s{number}")], at + 0.1)) == ["slow"]
        encoders.cancel(f"r{number}", at + 0.1)
        encoders.cancel(f"s{number}", at + 0.1)
        assert view(encoders, "fast", at).backoff_until == pytest.approx(at + 2**number)


def test_one_request_may_have_another_mode_and_its_images_then_stay():
    encoders = machine("auto", "fast", "slow")
    assert sorted(where(encoders.place("r1", images("abcd"), 0.0, "perImage"))) == ["fast", "fast", "slow", "slow"]
    outcome = encoders.finished(next(run for run, job in encoders.runs.items() if job.queue.id == "fast"), 0.01)
    outcome2 = encoders.finished(next(run for run, job in encoders.runs.items() if job.queue.id == "fast"), 0.02)
    assert outcome.moved == outcome2.moved == 0
    assert len(encoders.queues["slow"].running) + len(encoders.queues["slow"].waiting) == 2
