"""Properties of the simulated engine's core for any requests in any order."""

from array import array
from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.conftest import examples

from mmrouter_sim.core.caches import BlockPool, EncoderCache
from mmrouter_sim.core.events import AllBlocksCleared, BlockRemoved, BlockStored, VllmDialect
from mmrouter_sim.core.requests import Media, Request, block_hash, first_parent, published_int, sha256_cbor
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost

SIZE = 4


def engine(blocks=16, *, batched=16, seqs=4, largest=8, caching=True, seed=1):
    limits = Limits(
        blocks=blocks,
        block_size=SIZE,
        max_model_len=(blocks - 1) * SIZE,
        max_batched_tokens=batched,
        max_seqs=seqs,
        largest_image=largest,
        prefix_caching=caching,
    )
    return Scheduler(limits, cost=Cost(jitter=0.5), seed=seed, dialect=VllmDialect(SIZE, hash_seed="s"))


def request(tokens, *, answer=1, media=(), salt=None, name="r", report=False):
    return Request(name, array("I", tokens), lambda n: 900 + n, answer, tuple(media), salt, report_hits=report)


def step(rank):
    plan = rank.schedule()
    if plan is None:
        return [], []
    return rank.complete(plan)


def run(rank, *requests):
    """Run requests to their end and return the events."""
    for item in requests:
        rank.add(item)
    events = []
    while not rank.idle:
        events += step(rank)[1]
    return events


class Mirror:
    """What a consumer of the events believes the engine holds."""

    def __init__(self):
        self.copies = Counter()

    def apply(self, events):
        for event in events:
            match event:
                case BlockStored():
                    self.copies.update(event.block_hashes)
                case BlockRemoved():
                    self.copies.subtract(event.block_hashes)
                case AllBlocksCleared():
                    self.copies.clear()

    def holds(self, rank):
        assert min(self.copies.values(), default=0) >= 0
        assert +self.copies == Counter({published_int(d): n for d, n in rank.pool.contents().items()})
        listed = list(rank.contents.with_ancestors())
        assert {block.digest for block, held in listed if held} == set(rank.pool.contents())
        assert len({block.digest for block, _ in listed}) == len(listed)
        before = set()
        for block, _ in listed:  # with all that its hash covers
            parent, salted = block.parent, block.salt and block.parent is None
            assert parent is None or parent.digest in before
            before.add(block.digest)
            extras = (*(("mm", *each) for each in block.media), *((("cache_salt", block.salt),) if salted else ()))
            prior = parent.digest if parent else first_parent(sha256_cbor, "s")
            assert block.digest == block_hash(sha256_cbor, prior, block.ids, extras)


prompts = st.builds(
    lambda head, number, tail: [head] * number + tail,
    st.integers(1, 2),
    st.integers(1, 20),
    st.lists(st.integers(3, 4), max_size=6),
)
images = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(1, 8)), max_size=2)


def media_of(places, length):
    """Images that lie one after the other inside a prompt. One image always has one length."""
    placed, end = [], 0
    for name, gap, _ in places:
        size = {"a": 3, "b": 8}[name]
        if end + gap + size > length:
            break
        placed.append(Media(name, end + gap, size))
        end += gap + size
    return placed


actions = st.one_of(
    st.tuples(st.just("add"), prompts, images, st.integers(1, 14), st.sampled_from([None, "t"])),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("reset")),
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(actions, max_size=25), st.integers(9, 24), st.integers(3, 20), st.integers(1, 4))
def test_events_replayed_into_a_multiset_equal_the_pool_at_every_step(history, blocks, batched, seqs):
    rank = engine(blocks, batched=batched, seqs=seqs)
    mirror, added = Mirror(), []

    def advance():
        _, events = step(rank)
        mirror.apply(events)
        mirror.holds(rank)
        held = Counter(block for item in rank.running for block in item.blocks)
        assert rank.pool.used == len(held)
        assert rank.pool.used + rank.pool.free == blocks - 1
        assert 0 not in held, "it is reserved"
        assert len(rank.running) <= seqs
        for item in rank.running:
            assert len(item.blocks) * SIZE >= item.computed

    for action in history:
        match action:
            case ("add", tokens, places, answer, salt):
                if len(tokens) < (blocks - 1) * SIZE:
                    media = media_of(places, len(tokens))
                    added.append(request(tokens, answer=answer, media=media, salt=salt, name=str(len(added))))
                    rank.add(added[-1])
            case ("step", times):
                for _ in range(times):
                    if not rank.idle:
                        advance()
            case ("abort", which) if which < len(added):
                rank.abort(added[which])
            case ("reset",):
                rank.reset()  # its event goes out with the next step, so nothing can be compared before that
    for _ in range(2000):
        if rank.idle:
            break
        advance()
    assert all(item.finished for item in added)
    assert rank.pool.used == 0
    assert rank.encoder.held == 0


@settings(max_examples=examples(40), deadline=None)
@given(st.lists(st.tuples(prompts, images, st.sampled_from([None, "t"])), min_size=1, max_size=6))
def test_a_hit_never_spans_more_than_what_is_equal(requests):
    rank, seen = engine(200, batched=2048), []
    for number, (tokens, places, salt) in enumerate(requests):
        media = media_of(places, len(tokens))
        item = request(tokens, media=media, salt=salt, name=str(number))
        run(rank, item)
        facts = [(token, salt, tuple((m.identifier, m.offset) for m in media if m.offset <= i < m.end))
                 for i, token in enumerate(tokens)]  # fmt: skip
        best = 0
        for other in seen:
            equal = next((i for i, (a, b) in enumerate(zip(facts, other, strict=False)) if a != b), None)
            best = max(best, min(len(facts), len(other)) if equal is None else equal)
        reusable = min(best, len(tokens) - 1) // SIZE * SIZE
        assert item.cached_tokens <= reusable
        if not any(media) and not any(m for facts_ in seen for _, _, m in facts_):
            assert item.cached_tokens == reusable
        # What was sampled is in the cache too.
        seen.append(facts + [(900 + n, salt, ()) for n in range(item.answer_length - 1)])


def test_the_last_token_is_never_served_so_a_prompt_of_exactly_n_blocks_stores_its_last_block_again():
    rank = engine()
    run(rank, request(range(3 * SIZE)))
    again = request(range(3 * SIZE))
    (stored,) = run(rank, again)
    assert again.cached_tokens == 2 * SIZE
    assert len(stored.block_hashes) == 1
    assert sorted(rank.pool.contents().values()) == [1, 1, 2]


def test_equal_answers_decoded_side_by_side_make_one_copy_each():
    rank = engine()
    events = run(rank, request(range(6), answer=4, name="a"), request(range(6), answer=4, name="b"))
    hashes = [digest for event in events if isinstance(event, BlockStored) for digest in event.block_hashes]
    assert Counter(Counter(hashes).values()) == {1: 1, 2: 1}  # the first block is hit, the decoded one is doubled


def test_evicted_copies_are_announced_once_each_and_leaves_go_first():
    rank = engine(blocks=8)
    for name in "ab":
        run(rank, request(range(2 * SIZE), name=name))
    digests = [published_int(d) for d in rank.pool.contents()]
    events = run(rank, request(range(100, 100 + 6 * SIZE)))
    removed = [digest for event in events if isinstance(event, BlockRemoved) for digest in event.block_hashes]
    assert all(len(event.block_hashes) == 1 for event in events if isinstance(event, BlockRemoved))
    assert Counter(removed)[digests[1]] == 2
    assert removed[0] == digests[1]
    assert Counter(removed).get(digests[0], 0) <= 1


def test_a_long_prompt_is_computed_in_chunks_and_announced_chunk_by_chunk():
    rank = engine(blocks=40, batched=16)
    events = run(rank, request(range(42)))
    assert [len(event.token_ids) for event in events] == [16, 16, 8]
    assert events[1].parent_block_hash == events[0].block_hashes[-1]


def test_a_full_pool_queues_requests_and_preempts_the_youngest():
    rank = engine(blocks=7, batched=100)
    old, young = request(range(10), answer=12, name="old"), request(range(50, 60), answer=12, name="young")
    blocked = request(range(70, 80), name="blocked")
    for item in (old, young, blocked):
        rank.add(item)
    step(rank)
    assert rank.running == [old, young]
    assert list(rank.waiting) == [blocked]
    run(rank)
    assert young.preemptions > 0
    assert old.preemptions == 0
    assert [old.answer_length, young.answer_length, blocked.answer_length] == [12, 12, 1]


def test_reset_is_refused_while_blocks_are_held_and_its_event_goes_out_with_the_next_step():
    rank = engine()
    run(rank, request(range(8)))
    busy = request(range(20, 28), answer=3)
    rank.add(busy)
    step(rank)
    assert not rank.reset()
    run(rank)
    assert rank.reset()
    assert rank.pool.contents() == {}
    events = run(rank, request(range(8)))
    assert [type(event) for event in events] == [AllBlocksCleared, BlockStored]


def test_without_prefix_caching_nothing_is_announced_or_hit():
    rank = engine(caching=False)
    assert run(rank, request(range(9))) == []
    again = request(range(9))
    assert run(rank, again) == []
    assert again.cached_tokens == 0


def test_reported_hits_are_announced_again_without_a_new_copy():
    rank = engine()
    run(rank, request(range(10)))
    before = rank.pool.contents()
    (again,) = run(rank, request(range(10), report=True))
    assert again.parent_block_hash is None
    assert len(again.block_hashes) == 2
    assert rank.pool.contents() == before


def test_stop_ids_end_an_answer_and_lengths_count_the_stop_token():
    rank = engine()
    item = request(range(5), answer=10)
    item.stop_ids = frozenset({902})
    run(rank, item)
    assert (item.finished, item.answer_length) == ("stop", 3)


def test_two_images_that_do_not_fit_the_encoder_are_computed_in_two_steps():
    rank = engine(blocks=60, batched=16, largest=20)
    item = request(range(48), media=[Media("a", 0, 20), Media("b", 22, 20)])
    rank.add(item)
    reached = []
    while not rank.idle:
        step(rank)
        reached.append(item.computed)
    # 16, then cut off before b (a is needed until token 20), then a full step, then the rest.
    assert reached == [16, 22, 38, 48]


def test_an_image_that_is_encoded_already_costs_nothing_again():
    rank = engine(blocks=60, batched=64, largest=20)
    first = request(range(30), media=[Media("a", 3, 20)])
    other = request(range(100, 130), media=[Media("a", 4, 20)], name="o")
    rank.add(first)
    assert rank.schedule().visual_tokens == 20
    rank.add(other)
    plan = rank.schedule()
    assert plan.visual_tokens == 0


def test_an_encoder_cache_drops_the_idle_image_that_was_unused_longest():
    cache = EncoderCache(10)
    for name in "ab":
        cache.add("r", Media(name, 0, 5))
        cache.done("r", name)
    cache.plan("s", [Media("a", 0, 5)], 0, 5, 10)
    cache.done("s", "a")
    cache.add("t", Media("c", 0, 5))
    assert cache.plan("u", [Media("a", 0, 5)], 0, 5, 10) == (5, [])
    assert cache.plan("u", [Media("b", 6, 5)], 0, 11, 10) == (6, [])  # a and c are needed: no room for b


def test_a_pool_never_hands_out_more_than_it_has():
    pool = BlockPool(4, lambda _: None)
    with pytest.raises(ValueError, match="4 blocks wanted, 3 free"):
        pool.take(4)
    assert sorted(pool.take(3)) == [1, 2, 3]


def test_time_is_tokens_over_rates_divided_by_speed_within_the_jitter():
    rank = engine(blocks=60, batched=64, largest=20)
    rank.cost = Cost(prefill_rate=1000, encode_seconds=0.01, decode_seconds=0.5, jitter=0, speed=2)
    item = request(range(30), answer=3, media=[Media("a", 3, 20)])
    rank.add(item)
    plan = rank.schedule()
    assert plan.seconds == pytest.approx((0.03 + 0.2) / 2)
    rank.complete(plan)
    assert rank.schedule().seconds == pytest.approx(0.25)


def test_a_seed_gives_the_same_times_again():
    def times(seed):
        rank = engine(seed=seed)
        rank.add(request(range(40), answer=5))
        seconds = []
        while not rank.idle:
            plan = rank.schedule()
            seconds.append(plan.seconds)
            rank.complete(plan)
        return seconds

    assert times(1) == times(1) != times(2)


def test_limits_that_the_engine_would_not_start_with_are_refused():
    with pytest.raises(ValueError, match="maximum model length"):
        Limits(blocks=24, block_size=32, max_model_len=737)
    Limits(blocks=24, block_size=32, max_model_len=736)
