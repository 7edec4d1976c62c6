"""The simulated cluster: engines match the simulator's scheduler, no request is lost, policies behave as documented."""

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.conftest import shared_folder

from bench.cluster import many_engines, multiple_routers, policy_comparison
from bench.cluster.many_engines import Costs, Traffic
from bench.cluster.multiple_routers import Routers, spread, summary
from bench.cluster.policy_comparison import Case, Outcome
from bench.cluster.routing_policies import Dynamo, LeastLoaded, Ours, Policy, TextPrefix
from bench.cluster.simulation import simulate
from bench.cluster.virtual_engine import NEVER, EngineRequest, Machine, VirtualEngine
from bench.cluster.workloads import TRACE_BLOCK, ClusterRequest, mooncake, servegen
from mmrouter_sim.core.requests import Media, Request
from mmrouter_sim.core.scheduler import Limits, Scheduler
from mmrouter_sim.core.step_cost import Cost

SIZE = 8
TINY = Machine(
    prefill_rate=100.0,
    encode_seconds=0.01,
    decode_seconds=0.5,
    read_seconds=0.0,
    kv_tokens=30 * SIZE,
    max_batched_tokens=24,
    max_seqs=4,
    largest_image=16,
)


class Prompt:
    """Blocks by number, so that equal beginnings are equal tokens, and a tail of its own."""

    def __init__(self, at, blocks, tail, output, media=()):
        self.at, self.blocks, self.tail, self.output, self.media = at, tuple(blocks), tail, output, media
        self.tokens = len(blocks) * SIZE + tail

    def names(self):
        return tuple(repr(self.blocks[: n + 1]).encode() for n in range(len(self.blocks)))

    def request(self, number):
        ids = [token for block in self.blocks for token in range(block * SIZE, block * SIZE + SIZE)]
        ids += [10_000 + number * 100 + n for n in range(self.tail)]
        sample = lambda n: 1_000_000 + number * 1000 + n  # noqa: E731
        return Request(str(number), array("I", ids), sample, self.output, self.media)


def theirs(prompts, *, caching=True):
    """Return (first token, end, cached) of each on the simulator's scheduler."""
    limits = Limits(
        blocks=TINY.kv_tokens // SIZE + 1,
        block_size=SIZE,
        max_model_len=TINY.kv_tokens,
        max_batched_tokens=TINY.max_batched_tokens,
        max_seqs=TINY.max_seqs,
        largest_image=TINY.largest_image,
        prefix_caching=caching,
    )
    cost = Cost(TINY.prefill_rate, TINY.encode_seconds, TINY.decode_seconds, jitter=0.0)
    engine = Scheduler(limits, cost=cost)
    requests = [prompt.request(number) for number, prompt in enumerate(prompts)]
    first, end = {}, {}
    now, coming = prompts[0].at, 0
    while len(end) < len(prompts):
        while coming < len(prompts) and prompts[coming].at <= now:
            engine.add(requests[coming])
            coming += 1
        step = engine.schedule()
        if step is None:
            now = prompts[coming].at
            continue
        now += step.seconds
        for output in engine.complete(step)[0]:
            number = int(output.request.id)
            first.setdefault(number, now)
            if output.finished:
                end[number] = now
    numbers = range(len(prompts))
    encoded = engine.counters.visual_tokens
    return [(first[n], end[n], requests[n].cached_tokens) for n in numbers], engine.counters.preemptions, encoded


def mine(prompts, *, named=True):
    """Return the same of the engine in virtual time; its blocks are counted after every step."""
    engine = VirtualEngine(TINY, SIZE)
    runs = [
        EngineRequest(n, prompt.names() if named else (), prompt.tokens, prompt.output, prompt.media)
        for n, prompt in enumerate(prompts)
    ]
    first, end, coming = {}, {}, 0
    while len(end) < len(prompts):
        if coming < len(prompts) and prompts[coming].at <= engine.due:
            engine.add(runs[coming], prompts[coming].at)
            coming += 1
        else:
            now = engine.due
            news = engine.advance(now)
            first |= {run.number: now for run in news.answered}
            end |= {run.number: now for run in news.ended}
        in_use = {block for run in engine.running for block in run.blocks}
        assert engine.pool.used == len(in_use)
        assert engine.pool.free + engine.pool.used == engine.pool.size - 1
    assert engine.pool.used == 0
    assert engine.due == NEVER
    cached = [run.cached for run in runs]
    return [(first[n], end[n], cached[n]) for n in range(len(prompts))], engine.preemptions, engine.encoded_tokens


def arrivals(draw):
    """Distinct times that meet no end of a step."""
    gaps = draw(st.lists(st.floats(0.0137, 3.0), min_size=1, max_size=9))
    return [sum(gaps[: n + 1]) + n * 1e-4 * 2**0.5 for n in range(len(gaps))]


BLOCKS = st.lists(st.integers(0, 2), max_size=9)


@st.composite
def prompts_of(draw, most_tail, most_output):
    return [
        Prompt(at, draw(BLOCKS), draw(st.integers(1, most_tail)), draw(st.integers(1, most_output)))
        for at in arrivals(draw)
    ]


def same(actual, expected):
    assert len(actual) == len(expected)
    for (first, end, cached), (their_first, their_end, their_cached) in zip(actual, expected, strict=True):
        assert first == pytest.approx(their_first, abs=1e-6)
        assert end == pytest.approx(their_end, abs=1e-6)
        assert cached == their_cached


@settings(max_examples=60, deadline=None)
@given(prompts_of(4, 4))  # short answers: no block of one gets full, as only prompts' blocks have names
def test_an_engine_hits_evicts_and_takes_as_long_as_the_simulators_scheduler(prompts):
    expected, _, _ = theirs(prompts)
    same(mine(prompts)[0], expected)


@settings(max_examples=40, deadline=None)
@given(prompts_of(8, 60))
def test_requests_that_outgrow_the_cache_give_way_as_in_the_simulators_scheduler(prompts):
    expected, preemptions, _ = theirs(prompts, caching=False)
    actual, mine_preempted, _ = mine(prompts, named=False)
    same(actual, expected)
    assert mine_preempted == preemptions


def test_the_drawn_answers_do_outgrow_the_cache():
    prompts = [Prompt(0.1 + n * 0.01, [n], 1, 100) for n in range(4)]
    assert mine(prompts, named=False)[1] == theirs(prompts, caching=False)[1] > 0


def test_an_image_is_encoded_when_its_first_token_is_computed_and_not_when_all_of_it_is_hit():
    image = (Media("i", SIZE, SIZE),)
    prompts = [Prompt(0.1, [0, 1], 3, 2, image), Prompt(9.2, [0, 1], 3, 2, image), Prompt(20.3, [2, 1], 3, 2, image)]
    actual, _, encoded = mine(prompts)
    expected, _, their_encoded = theirs(prompts)
    same(actual, expected)
    assert encoded == their_encoded == SIZE  # the encoder's output is kept for the third


def small(seed=3, repeats=True, engines=3):
    return servegen(repeats, engines, 0.6, 8.0, Machine(), seed=seed)


def test_the_same_seed_gives_the_same_run():
    runs = [simulate(small(), 3, Machine(), Ours(3, 16)) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("make", [Policy, LeastLoaded, TextPrefix])
def test_every_prompt_token_is_either_hit_or_computed_once(make):
    load = replace(small(), counted_from=0.0)
    engines = []
    run = simulate(load, 3, Machine(), make(3), watch=lambda now, fleet: engines or engines.extend(fleet))
    assert run.preemptions == 0
    assert run.tokens == sum(request.tokens for request in load.requests)
    assert sum(engine.computed_tokens for engine in engines) == run.tokens - run.cached


@pytest.mark.parametrize("at_once", [True, False])
def test_the_index_is_the_caches_as_far_as_the_feed_has_come(at_once):
    """The oracle's at every moment; ours when the last delta is in."""
    machine = Machine(kv_tokens=20_000)
    policy, fleet, checks = Ours(3, 16), [], []

    def watch(now, engines):
        fleet[:] = engines
        checks.append(now)
        if at_once and len(checks) % 20 == 0:
            for number, engine in enumerate(engines):
                assert policy.holds(number) == {int.from_bytes(n, "little") for n in engine.pool.contents()}

    simulate(small(), 3, machine, policy, at_once=at_once, watch=watch)
    assert len(checks) > 50
    differences = [
        policy.holds(n) ^ {int.from_bytes(name, "little") for name in engine.pool.contents()}
        for n, engine in enumerate(fleet)
    ]
    assert differences == [set()] * 3
    assert any(engine.pool.contents() for engine in fleet)


def test_bookings_are_gone_when_all_requests_are():
    policy = Ours(3, 16)
    simulate(small(), 3, Machine(), policy)
    usages = [usage for worker in policy.fleet for usage in worker.usage.values()]
    assert [(u.requests, u.prefill, u.active) for u in usages] == [(0, 0, 0)] * len(usages)


def test_the_feed_costs_few_of_the_oracles_hits_and_no_policy_beats_both():
    load = servegen(True, 3, 0.7, 25.0, Machine())
    runs = {
        "oracle": simulate(load, 3, Machine(), Ours(3, 16), at_once=True),
        "ours": simulate(load, 3, Machine(), Ours(3, 16)),
        "dynamo": simulate(load, 3, Machine(), Dynamo(3, 16)),
        "turns": simulate(load, 3, Machine(), Policy(3)),
    }
    hits = {name: run.hit_ratio for name, run in runs.items()}
    assert hits["ours"] >= 0.97 * hits["oracle"]
    assert hits["oracle"] > hits["dynamo"] > hits["turns"]
    assert hits["oracle"] <= load.reusable + 0.01
    assert len(load.alone) == len(runs["ours"].seconds)
    assert sum(load.alone) < sum(runs["oracle"].seconds)


def cluster_request(number, blocks, at=0.0, output=4):
    keys = array("Q", blocks)
    names = tuple(key.to_bytes(8, "little") for key in keys)
    return ClusterRequest(at, len(blocks) * SIZE, output, keys, names, keys, number)


def test_dynamos_cost_of_the_fields_example():
    """The example of Dynamo's documentation: overlaps 2, 5, 8 of 10 blocks and 10, 5, 9 blocks in use cost 18, 10, 11.

    The blocks in use belong to three requests without a shared prefix.
    """
    policy = Dynamo(3, SIZE)
    for number, (engine, used) in enumerate(((0, 10), (1, 5), (2, 9))):
        blocks = range(1000 * (engine + 1), 1000 * (engine + 1) + used)
        policy.cache_changed(engine, [key.to_bytes(8, "little") for key in blocks], [])
        assert policy.choose(number, cluster_request(number, blocks), 0.0) == engine
    prompt = list(range(100, 110))
    for engine, overlap in enumerate((2, 5, 8)):
        policy.cache_changed(engine, [key.to_bytes(8, "little") for key in prompt[:overlap]], [])
    assert policy.choose(3, cluster_request(3, prompt), 0.0) == 1


def test_the_text_prefix_does_not_see_images_and_smg_s_thresholds_decide():
    policy = TextPrefix(2)
    assert policy.choose(0, cluster_request(0, range(10)), 0.0) == 0
    assert policy.choose(1, cluster_request(1, [0, 1, 2, 3, *range(50, 56)]), 0.0) == 0  # 40 % match
    assert policy.choose(2, cluster_request(2, [0, 1, *range(60, 68)]), 0.0) == 1  # 20 %: to the smaller tree
    for number in range(3, 67):
        assert policy.choose(number, cluster_request(number, range(10)), 0.0) == 0
    assert policy.choose(67, cluster_request(67, range(10)), 0.0) == 1  # 65 more, over 1.5 times as many


@pytest.mark.parametrize("repeats", [True, False])
def test_a_load_is_work_over_what_all_engines_do_and_sessions_are_what_can_be_reused(repeats):
    load = servegen(repeats, 2, 0.5, 40.0, Machine())
    assert list(load.requests) == sorted(load.requests, key=lambda request: request.at)
    assert (load.reusable > 0.5) == repeats
    run = simulate(replace(load, counted_from=0.0), 2, Machine(), Ours(2, 16))
    seconds = (run.tokens - run.cached) / Machine().prefill_rate + run.encoded * Machine().encode_seconds
    assert seconds / load.requests[-1].at / 2 == pytest.approx(0.5, rel=0.15)


def test_parts_of_a_trace_share_only_what_the_whole_service_shares():
    traces = shared_folder("MMROUTER_TRACES", "traces/mooncake")
    load = mooncake(traces, "conversation", 8, 0.5, 60.0, policy_comparison.LARGE)
    copies = {key >> 32 for request in load.requests for key in request.keys}
    assert copies == {0, 1, 2, 3, 4}
    assert {key for request in load.requests for key in request.keys if key >> 32 == 0} == {0}
    assert all(len(request.keys) == request.tokens // TRACE_BLOCK for request in load.requests)


def test_without_traces_their_rows_say_so_and_the_others_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(policy_comparison, "SIZES", (2,))
    monkeypatch.setattr(policy_comparison, "REUSED", 0.0)
    monkeypatch.setitem(policy_comparison.SECONDS, "servegen", {2: 5.0})
    rows = policy_comparison.run(tmp_path)
    missing = [item for item in rows if item.value is None]
    assert len(missing) == 4
    assert all(item.peer.startswith(f"not run: no traces at {tmp_path}") for item in missing)
    goals = {item.name: item.goal for item in rows if item.goal}
    assert sorted(goals.values()) == ["<= 1.02", ">= 0.97", ">= 1.2"]
    assert sum(item.name.startswith("cluster servegen") for item in rows) == 4


CASE = Case("servegen sessions", 2, 0.5)


@pytest.fixture(scope="module")
def load():
    return servegen(True, 2, 0.6, 6.0, Machine())


def run_routers(load, routers, delay=multiple_routers.GOSSIP_DELAY):
    policy = Routers(routers, 2, load.block_size, delay)
    return policy, simulate(load, 2, Machine(), policy, watch=policy.watch)


def test_every_router_has_the_same_index_in_the_end(load):
    policy, _ = run_routers(load, 3)
    assert all(not usage.requests for router in policy.routers for w in router.workers for usage in w.usage.values())
    for engine in range(2):
        assert policy.routers[0].holds(engine) == policy.routers[1].holds(engine) == policy.routers[2].holds(engine)


def test_one_router_among_none_chooses_as_one_without_exchange(load):
    assert run_routers(load, 1)[1].chosen == simulate(load, 2, Machine(), Ours(2, load.block_size)).chosen


def test_what_is_heard_of_others_counts_while_one_chooses_and_not_beside_it(load):
    policy, heard = run_routers(load, 2, 0.0)
    assert heard.chosen != run_routers(load, 2, float("inf"))[1].chosen
    for router in policy.routers:
        assert all(abs(usage.active) < 1e-6 for worker in router.workers for usage in worker.usage.values())


def test_requests_of_one_time_are_spread_to_the_next_time_in_their_order(load):
    requests = tuple(replace(request, at=float(n // 4)) for n, request in enumerate(load.requests[:8]))
    moved = spread(replace(load, requests=requests)).requests
    assert [request.at for request in moved] == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]
    assert [request.tokens for request in moved] == [request.tokens for request in requests]


def test_the_loss_is_over_one_router_in_the_same_case():
    outcomes = {1: Outcome(0, 200, 0.5), 2: Outcome(0, 202, 0.4), 4: Outcome(0, 202, 0.4)}
    rows = {item.name: item for item in summary({CASE: outcomes})}
    heard = rows["2 routers before 2 engines: TTFT p95 over 1 router, mean"]
    assert (heard.value, heard.met) == (1.01, True)
    assert rows["2 routers before 2 engines: hits over 1 router's, mean"].value == 0.8


# -- large fleets: what grows with engines, with routers, and with both

TRAFFIC = Traffic(requests=2.0, frames=40.0, blocks=300.0)


def test_more_routers_divide_placements_and_no_feed():
    feed_only, placing = Costs(10.0, 0.0, 0.0), Costs(0.0, 0.0, 500.0)
    assert feed_only.cores(TRAFFIC, 1000, 1) == feed_only.cores(TRAFFIC, 1000, 10) == pytest.approx(0.4)
    assert placing.cores(TRAFFIC, 1000, 10) == pytest.approx(placing.cores(TRAFFIC, 1000, 1) / 10)


def test_one_router_applies_no_load_of_others():
    costs = Costs(0.0, 5.0, 0.0)
    assert costs.cores(TRAFFIC, 1000, 1) == 0
    assert costs.cores(TRAFFIC, 1000, 2) == pytest.approx(1000 * 2.0 * many_engines.CHANGES * 5.0 / 1e6)


def test_every_frame_is_applied_in_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(many_engines, "FRAMES", 300)
    monkeypatch.setattr(many_engines, "QUERIES", 2)
    costs = many_engines.applied(5, 4)
    assert min(costs.frame, costs.load, costs.placement) > 0
    seqs = [7, 0, 3]
    sent = many_engines.frames(seqs, 4)
    for worker, first in enumerate(seqs):
        numbers = [many_engines.feed.decode_published(payload).seq for each, payload in sent if each == worker]
        assert numbers == list(range(first + 1, first + 1 + len(numbers)))


def test_a_busy_engine_has_requests_and_stores_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(many_engines, "SECONDS", 5.0)
    traffic = many_engines.simulated_traffic()
    assert traffic.requests > 0
    assert traffic.blocks > traffic.requests
