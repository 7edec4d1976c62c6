"""Eligibility of workers, with and without overlap (docs/architecture.md), and what a booking counts."""

from array import array
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.router.rig import BLOCK, IDS, KEYS, SEED, Rig, deployment, prepared

from mmrouter_lib import feed
from mmrouter_lib.block_keys import Span, block_keys, pack_keys
from mmrouter_lib.cache_layout import CacheGroup
from mmrouter_router.fleet.workers import RECENT, Member
from mmrouter_router.request.prepared import Prepared
from mmrouter_router.scheduling.candidates import NoWorkerError
from mmrouter_router.scheduling.placer import Placer
from mmrouter_router.scheduling.scoring import WEIGHTS

ENCODERS = {"name": "encoder", "role": "encoder", "replicas": 1, "accelerator": {"kind": "cpu"}}


@pytest.fixture
def rig():
    return Rig()


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


def test_pending_worker_is_a_last_resort_without_exactness(rig):
    pending = rig.worker("a", KEYS, canary="")
    decision = rig.placer.place(prepared())
    assert decision.target.worker is pending
    assert (decision.exactness, decision.reasons) == ("affinity", ("unverified:worker",))
    verified = rig.worker("b")
    assert rig.placer.place(prepared()).target.worker is verified


def test_verified_worker_waits_for_its_readiness_gates(rig):
    new = rig.worker("new", KEYS, admitted=False)
    rig.worker("old")
    assert rig.placer.place(prepared()).target.worker.member.name == "old"
    assert rig.placer.place(prepared(), policy="roundRobin").target.worker.member.name == "old"
    rig.fleet.join(replace(new.member, admitted=True))
    decision = rig.placer.place(prepared())
    assert (decision.target.worker, decision.choice.winner.overlap, decision.exactness) == (new, 6, "exact")


def test_last_resort_keeps_overlap_of_verified_workers_only(rig):
    rig.worker("new", KEYS, admitted=False)
    decision = rig.placer.place(prepared())
    assert (decision.choice.winner.overlap, decision.exactness) == (6, "exact")
    rig = Rig()
    rig.worker("other", KEYS, canary="False", admitted=False)
    assert rig.placer.place(prepared()).reasons == ("unverified:worker",)


@pytest.mark.parametrize("values", [{"engine_state": "down"}, {"engine_state": "starting"}, {"draining": True}])
def test_down_or_draining_engine_is_no_candidate(rig, values):
    rig.worker("a", KEYS, **values)
    with pytest.raises(NoWorkerError, match="1 unsynced"):
        rig.placer.place(prepared())


def test_new_epoch_drops_cache_and_canary(rig):
    worker = rig.worker("a", KEYS)
    rig.beat(worker, canary="", epoch=2)
    assert rig.placer.eligibility(worker) == "unsynced"
    rig.sync(worker, (), epoch=2)
    rig.beat(worker, canary="", epoch=2)
    assert rig.placer.eligibility(worker) == "pending"
    assert rig.placer.place(prepared()).choice.winner.overlap == 0


def test_silent_feed_serves_as_last_resort_without_overlap(rig):
    silent = rig.worker("a", KEYS)
    rig.fleet.mark_stale(silent)
    assert rig.placer.eligibility(silent) == "unsynced"
    decision = rig.placer.place(prepared())
    assert (decision.target.worker, decision.exactness) == (silent, "affinity")
    assert not decision.choice.winner.scored
    other = rig.worker("b")
    assert rig.placer.place(prepared()).target.worker is other


def test_only_device_memory_of_the_indexed_group_counts(rig):
    worker = rig.worker("a")
    for group, medium in ((0, "CPU"), (1, "GPU"), (0, "GPU")):  # the sidecar does not name CPU, as older ones
        rig.delta(worker, KEYS[:3], group=group, medium=medium)
        expected = 3 if (group, medium) == (0, "GPU") else 0
        assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == expected


WINDOW = {"groups": (CacheGroup(0, "sliding_window", 2 * BLOCK + 1),)}
FULL_SECOND = {"groups": (CacheGroup(0, "sliding_window", 64), CacheGroup(1, "full_attention"))}


def test_window_group_hits_after_dropped_blocks(rig):
    rig.worker("a", KEYS[2:4], **WINDOW)
    rig.worker("b", KEYS[:3])
    scores = {s.candidate.name: s.candidate.overlap for s in rig.placer.place(prepared()).choice.scores}
    assert scores == {"a": 4, "b": 3}


def test_block_with_the_last_token_is_not_hit_by_a_window(rig):
    ids = IDS[: 4 * BLOCK]
    rig.worker("a", KEYS[2:4], **WINDOW)
    assert rig.placer.place(prepared(ids=ids)).choice.winner.overlap == 0
    longer = rig.placer.place(prepared(ids=IDS[: 4 * BLOCK + 1]))
    assert longer.choice.winner.overlap == 4


def test_case_45_full_attention_group_decides_in_any_position():
    """Once the groups are known, the keys of the other group are computed again."""
    rig = Rig()
    worker = rig.worker("a")
    rig.delta(worker, KEYS[:3], group=1)
    rig.delta(worker, KEYS)
    assert rig.placer.place(prepared(), dry_run=True).choice.winner.overlap == 6
    rig.beat(worker, **FULL_SECOND)
    assert rig.placer.eligibility(worker) == "unsynced"
    asked = worker.sync.request_id
    for group, keys, last in ((0, KEYS, False), (1, KEYS[:3], True)):
        part = feed.SnapshotPart(asked, worker.id, 1, 2, 0, group, "GPU", pack_keys(keys), last)
        rig.fleet.on_reply(worker, part)
    assert rig.placer.eligibility(worker) == "verified"
    assert rig.placer.place(prepared()).choice.winner.overlap == 3
    rig.delta(worker, KEYS[3:4], group=1)
    assert rig.placer.place(prepared()).choice.winner.overlap == 4
    assert worker.delta_event.is_set()


def test_groups_before_the_snapshot_need_no_second_one(rig):
    worker = rig.fleet.join(Member("uid-a", "a", "127.0.0.1", "worker", "worker"))
    rig.fleet.feed_connected(worker)
    rig.beat(worker, **FULL_SECOND)
    asked = worker.sync.request_id
    for group in (0, 1):
        part = feed.SnapshotPart(asked, worker.id, 1, 0, 0, group, "GPU", pack_keys(KEYS[:2]), group == 1)
        rig.fleet.on_reply(worker, part)
    rig.beat(worker, **FULL_SECOND)
    assert worker.sync.synced
    assert rig.placer.place(prepared()).choice.winner.overlap == 2


FULL, MAMBA, CHUNKED = (CacheGroup(n, k, 0, BLOCK) for n, k in enumerate(["full_attention", "mamba", "chunked_local"]))


def hybrid(rig, *held, all_groups=True):
    """A worker with these groups, each with the keys that it holds."""
    worker = rig.worker("a", groups=tuple(group for group, _ in held), all_groups=all_groups)
    if not worker.sync.synced:  # the snapshot came before the groups
        rig.sync(worker, ())
    for group, keys in held:
        rig.delta(worker, keys, group=group.group)
    return worker


def test_case_45_mamba_is_hit_at_its_rightmost_state_within_full_attention(rig):
    hybrid(rig, (FULL, KEYS[:4]), (MAMBA, [KEYS[1], KEYS[4]]))
    decision = rig.placer.place(prepared())
    assert (decision.choice.winner.overlap, decision.exactness, decision.reasons) == (2, "exact", ())


def test_removals_and_clears_reach_every_group(rig):
    worker = hybrid(rig, (FULL, KEYS[:4]), (MAMBA, KEYS[1:4:2]))
    assert rig.placer.place(prepared()).choice.winner.overlap == 4
    rig.delta(worker, removed=KEYS[3:4], group=1)
    assert rig.placer.place(prepared()).choice.winner.overlap == 2
    rig.delta(worker, cleared=True)
    rig.delta(worker, KEYS[:4])
    assert rig.placer.place(prepared()).choice.winner.overlap == 0
    rig.delta(worker, KEYS[2:3], group=1)
    assert rig.placer.place(prepared()).choice.winner.overlap == 3


def test_case_45_kinds_that_are_not_understood_make_a_decision_bounded(rig):
    hybrid(rig, (FULL, KEYS[:4]), (CHUNKED, KEYS[:3]))
    decision = rig.placer.place(prepared())
    assert decision.choice.winner.overlap == 3
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:chunked_local",))


def test_case_45_groups_of_other_block_sizes_promise_nothing_and_keep_their_canary(rig):
    larger = CacheGroup(1, "mamba", 0, 2 * BLOCK)
    worker = hybrid(rig, (FULL, KEYS[:4]), (larger, KEYS[1:2]))
    decision = rig.placer.place(prepared())
    assert (decision.choice.winner.overlap, rig.placer.eligibility(worker)) == (0, "verified")
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:block_size",))


def test_blocks_whose_evictions_are_in_part_hidden_are_no_promise_and_decide_the_choice(rig):
    """An engine that holds them is more likely to hit than one that does not, and may hit nothing."""
    holder = rig.worker("a", KEYS[:4])
    for number in range(4):
        rig.worker(f"other {number}")
    decision = rig.placer.place(replace(prepared(), hidden=("states",)))
    winner = decision.choice.winner
    assert (decision.target.worker, winner.overlap, winner.unproved, winner.hit) == (holder, 0, 4, 4)
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:states",))
    assert decision.choice.reason.endswith("0 of 6 blocks held, 4 more that it may not hit")
    assert list(decision.fresh) == list(KEYS[4:])


@pytest.mark.parametrize(
    ("window", "change", "exactness"),
    [
        (2 * BLOCK, {}, "exact"),
        (2 * BLOCK, {"salt": "tenant"}, "bounded"),
        (2 * BLOCK, {"spans": (Span(1, 2, bytes(32)),)}, "bounded"),
        (100 * BLOCK, {"salt": "tenant"}, "exact"),
    ],
)
def test_images_and_salts_before_a_window_without_full_attention_bound_the_promise(rig, window, change, exactness):
    hybrid(rig, (CacheGroup(0, "sliding_window", window, BLOCK), KEYS[2:4]))
    decision = rig.placer.place(replace(prepared(), **change))
    assert decision.exactness == exactness
    assert decision.reasons == (() if exactness == "exact" else ("cache_groups:window",))


def test_a_promise_is_exact_while_no_block_before_a_window_is_unknown(rig):
    worker = hybrid(rig, (group := CacheGroup(0, "sliding_window", 2 * BLOCK, BLOCK), KEYS[2:4]))
    for has_aside, exactness in ((True, "bounded"), (False, "exact")):
        rig.beat(worker, groups=(group,), all_groups=True, has_aside=has_aside)
        assert rig.placer.place(replace(prepared(), salt="tenant")).exactness == exactness


def test_windows_of_an_older_sidecar_bound_the_promise(rig):
    """It publishes only those blocks of a window beside full attention that stand in events without gaps."""
    hybrid(rig, (FULL, KEYS[:4]), (CacheGroup(1, "sliding_window", BLOCK + 1), ()), all_groups=False)
    decision = rig.placer.place(prepared())
    assert decision.choice.winner.overlap == 0
    assert (decision.exactness, decision.reasons) == ("bounded", ("cache_groups:old_feed",))


@pytest.mark.parametrize("all_groups", [False, True])
def test_prompts_of_models_with_states_are_not_exact_on_a_feed_that_may_lack_groups(rig, all_groups):
    """Older sidecars do not name mamba groups, so the overlap may be too high."""
    hybrid(rig, (FULL, KEYS[:4]), all_groups=all_groups)
    decision = rig.placer.place(replace(prepared(), may_have_states=True))
    assert decision.reasons == (() if all_groups else ("old_feed:cache_groups",))
    assert decision.exactness == ("exact" if all_groups else "affinity")
    assert rig.placer.place(prepared()).exactness == "exact"


def test_case_49_cleared_rank_and_removed_worker(rig):
    worker = rig.worker("a", KEYS[:2], ranks=2)
    for rank in (0, 1):
        rig.delta(worker, KEYS[:4], rank=rank)
    rig.delta(worker, rank=1, cleared=True)
    decision = rig.placer.place(prepared())
    assert {s.candidate.id[-1]: s.candidate.overlap for s in decision.choice.scores} == {"0": 4, "1": 0}
    assert decision.target.rank == 0
    rig.fleet.leave("uid-a")
    while rig.fleet.index.sweep():
        pass
    assert len(rig.fleet.index) == 0


def test_keys_depend_on_the_scope():
    """Two SGLang releases make different sentinels of an image; vLLM workers share one prompt."""
    rig = Rig()
    asked = []

    class Spied(Prepared):
        def keys(self, block_size, scope=None, lookahead=0):
            asked.append((block_size, scope, lookahead))
            return super().keys(block_size)

    for name, version in (("a", "0.5.23"), ("b", "0.5.23"), ("c", "0.5.24")):
        rig.worker(name, KEYS[:1], engine="sglang", engine_version=version)
    rig.worker("d")
    rig.placer.place(Spied(**vars(prepared())))
    assert len(asked) == len(set(asked)) == 3
    assert {scope[0][:6] if scope else None for _, scope, _ in asked} == {"0.5.23", "0.5.24", None}


IMAGE = Span(BLOCK, 3 * BLOCK, bytes(32))


def test_partly_hit_image_is_encoded_whole(rig):
    keys = block_keys(IDS, BLOCK, (IMAGE,), SEED)
    rig.worker("part", keys[:3])
    rig.worker("whole", keys[:4])
    rig.worker("none")
    request = replace(prepared(), spans=(IMAGE,))
    scores = {s.candidate.name: s.candidate.encode for s in rig.placer.place(request).choice.scores}
    image = 3 * WEIGHTS.visual
    assert scores == {"whole": 0.0, "part": pytest.approx(image), "none": pytest.approx(image)}


def test_with_encoders_an_engine_encodes_nothing(rig):
    placer = Placer(deployment(ENCODERS), rig.fleet)
    rig.worker("a")
    assert placer.place(replace(prepared(), spans=(IMAGE,))).choice.winner.encode == 0


def test_unpredicted_request_uses_consistent_hash(rig):
    rig.worker("a", KEYS)
    rig.worker("b")
    request = replace(prepared("affinity", array("I")), reasons=("field:unknown",))
    decision = rig.placer.place(request)
    assert (decision.policy, decision.exactness, decision.reasons) == ("consistentHash", "affinity", ("field:unknown",))


def test_each_block_size_uses_its_own_keys(rig):
    rig.worker("a", KEYS)
    rig.worker("b", block_keys(IDS, 32, (), SEED), block_size=32)
    scores = {s.candidate.name: s.candidate for s in rig.placer.place(prepared()).choice.scores}
    assert (scores["a"].overlap, scores["a"].blocks) == (6, 6)
    assert (scores["b"].overlap, scores["b"].blocks) == (3, 3)


def test_longest_prefix_holder_is_chosen_exactly_and_excluded_workers_are_skipped(rig):
    rig.worker("a", KEYS)
    rig.worker("b", KEYS[:2])
    rig.worker("c")
    held = ((), ("a", 6, "exact")), ({"uid-a"}, ("b", 2, "exact")), ({"uid-a", "uid-b"}, ("c", 0, "exact"))
    for exclude, expected in held:
        decision = rig.placer.place(prepared(), exclude=exclude)
        assert (decision.target.worker.member.name, decision.choice.winner.overlap, decision.exactness) == expected
    with pytest.raises(NoWorkerError, match=r"^3 failed or not allowed for this request$"):
        rig.placer.place(prepared(), exclude={"uid-a", "uid-b", "uid-c"})


CHANGES = ("join", "leave", "canary", "drain", "stale", "clear", "gates", "time", "ranks", "size")


def candidates(placer: Placer) -> object:
    """What a placement would choose from, or why it cannot."""
    try:
        groups = placer.groups((), frozenset({"worker"}), None)
    except NoWorkerError as error:
        return str(error)
    rows = array("q", range(1000))
    return {
        group.form: (group.targets, group.scored, group.ids, group.caches, [*group.held(rows)], [*group.loads(rows)])
        for group in groups
    }


@given(
    st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 4), st.booleans(), st.integers(0, 3)), max_size=25),
    st.integers(0, 5),
)
def test_candidates_that_are_kept_equal_those_of_a_new_placer(steps, workers):
    rig = Rig()
    names = "abcde"
    for name in names[:workers]:
        rig.worker(name, KEYS)
    for change, number, yes, looks in steps:
        worker = rig.fleet.workers.get(f"uid-{names[number]}")
        if change == "time":
            rig.clock.now += 30
        elif worker is None or change == "join":
            rig.worker(names[number], KEYS[: number + 1], admitted=yes)
        elif change == "leave":
            rig.fleet.leave(worker.member.uid)
        elif change == "canary":
            rig.beat(worker, "True" if yes else "")
        elif change == "drain":
            rig.beat(worker, draining=yes)
        elif change == "stale":
            rig.fleet.mark_stale(worker)
        elif change == "clear":
            rig.delta(worker, KEYS, cleared=yes)
        elif change == "ranks":
            rig.beat(worker, ranks=1 + yes)
        elif change == "size":
            rig.beat(worker, block_size=2 * BLOCK if yes else BLOCK)
        else:
            rig.fleet.join(replace(worker.member, admitted=yes))
        if looks:  # else several changes are seen at once
            assert candidates(rig.placer) == candidates(Placer(deployment(), rig.fleet)), change


def test_candidates_are_found_anew_after_more_changes_than_a_fleet_remembers(rig):
    first, *others = [rig.worker(name, KEYS) for name in "abc"]
    candidates(rig.placer)
    rig.beat(first, draining=True)
    for number in range(RECENT):
        rig.beat(others[number % 2], draining=number < RECENT // 2)
    assert rig.fleet.changed_since(rig.fleet.version - RECENT - 1) is None
    assert candidates(rig.placer) == candidates(Placer(deployment(), rig.fleet))


@pytest.mark.parametrize(("release", "others"), [("0.5.21", {"tools", "input"}), ("0.5.22", {"tools"}), ("0.5.23", {})])
def test_what_a_release_of_sglang_shows_otherwise_is_placed_by_affinity_there(rig, release, others):
    rig.worker("a", engine="sglang", engine_version=release)
    bodies = {"tools": {"tools": [{}]}, "input": {"input": [{"role": "developer"}]}}
    for name, body in {**bodies, "": {"tools": [], "input": [{"role": "user"}]}}.items():
        decision = rig.placer.place(replace(prepared(), request=SimpleNamespace(body=body)))
        expected = ("affinity", (f"release:{name}",)) if name in others else ("exact", ())
        assert (decision.exactness, decision.reasons) == expected


@pytest.mark.parametrize(("release", "decided"), [("0.5.20", "affinity"), ("0.5.21", "exact"), ("", "exact")])
def test_a_release_before_the_first_that_makes_a_prompt_gets_it_by_affinity(rig, release, decided):
    rig.worker("a", engine="sglang", engine_version=release)
    request = SimpleNamespace(body={}, prompt_field="messages")
    decision = rig.placer.place(replace(prepared(), request=request, first_release=(0, 5, 21)))
    assert (decision.exactness, decision.reasons) == (decided, ("release:messages",) * (decided == "affinity"))
    assert decision.policy == ("consistentHash" if decided == "affinity" else "kv")
