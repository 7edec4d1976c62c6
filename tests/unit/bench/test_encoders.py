"""The simulation of encoders: its short cuts equal the scheduler, its bounds are bounds, its sample is what it says."""

import random

import msgspec
import pytest
from unit.conftest import shared_folder

from bench.encoders import image_spreading as policies
from bench.encoders.image_requests import SAMPLE, Arrival, Device, Picture, arrivals, image_sizes, load_clients, shared
from hack.generators.servegen_images import derive

FLEET = policies.FLEETS["8:3:1"]


def requests_at(count=150, share=0.6, cv=2.0, seed=3):
    rnd = random.Random(seed)
    return arrivals(rnd, image_sizes(rnd, load_clients(), count), FLEET, share, cv)


def test_the_sample_is_what_the_traces_say():
    sample = msgspec.to_builtins(derive(shared_folder("MMROUTER_TRACES", "traces/servegen/mm-image")))
    assert msgspec.json.decode(SAMPLE.read_bytes()) == sample


def test_the_sample_has_requests_with_one_to_twelve_images_and_most_have_one():
    counts = [len(body) for body in image_sizes(random.Random(1), load_clients(), 4000)]
    assert set(range(1, 9)) <= set(counts) <= set(range(1, 13))
    assert 0.7 < counts.count(1) / len(counts) < 0.9


def test_load_is_work_over_what_the_whole_fleet_does():
    requests = requests_at(3000, share=0.5, cv=1.0)
    work = sum(shared(picture, FLEET) for request in requests for picture in request.pictures)
    assert work / requests[-1].at == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("how", ["perImage", "perRequest"])
@pytest.mark.parametrize("weights", [(1, 1, 1), (8, 3, 1), (5, 0, 2)])
def test_the_fast_form_of_a_split_equals_the_schedulers_mode(how, weights):
    requests = requests_at()
    fast = policies.split(policies.service_times(requests, FLEET), how, weights)
    assert policies.scheduled(requests, FLEET, how, weights=weights) == pytest.approx(fast)


def test_a_split_in_blocks_takes_a_then_b():
    requests = [Arrival(float(n), (Picture(0, 1.0, n),)) for n in range(9)]
    seconds = policies.split(policies.service_times(requests, (Device(1, 0.1), Device(1, 0.2))), "blocks", (2, 1))
    assert seconds == pytest.approx([0.1, 0.1, 0.2] * 3)


def test_bounds_are_exact_where_they_can_be_counted_by_hand():
    fleet = (Device(8.0, 0.0), Device(1.0, 0.0))
    lone = [Arrival(0.0, (Picture(72, 1.0, 1),))]
    assert policies.pooled(lone, fleet) == pytest.approx([8.0])  # 72 tokens at 9
    assert policies.undivided(lone, fleet) == pytest.approx([9.0])  # 72 tokens at 8
    two = [Arrival(0.0, (Picture(72, 1.0, 1), Picture(8, 1.0, 2)))]
    # One at 8 and one at 1 for 8 s; or, after 8 s, 64 and 8 are done, and the large one has 8 left at 8.
    assert policies.undivided(two, fleet) == pytest.approx([9.0])
    queue = [Arrival(0.0, (Picture(72, 1.0, 1),)), Arrival(1.0, (Picture(72, 1.0, 2),))]
    assert policies.pooled(queue, fleet) == pytest.approx([8.0, 15.0])
    # The second has 8 of its 72 done slowly when the first ends, then 64 at 8.
    assert policies.undivided(queue, fleet) == pytest.approx([9.0, 16.0])


def test_undivided_images_are_never_faster_than_divided_ones_in_the_mean():
    requests = requests_at(400)
    assert sum(policies.undivided(requests, FLEET)) >= sum(policies.pooled(requests, FLEET))


def test_the_same_seed_gives_the_same_figures():
    assert policies.cases((0.6,), 60) == policies.cases((0.6,), 60)


def test_the_goals_of_the_encoder_scheduler_are_rows_of_that_name_and_met_on_a_short_run(monkeypatch):
    short = policies.cases
    monkeypatch.setattr(policies, "cases", lambda loads=policies.LOADS: short(loads, 250))
    rows = {item.name: item for item in policies.run()}
    goals = ("p95_gain_over_round_robin", "worst_case_over_best_static", "over_pooled_bound")
    assert [rows[name].met for name in goals] == [True] * 3


def test_a_request_that_never_ends_is_no_figure(monkeypatch):
    monkeypatch.setattr(policies.EncoderScheduler, "finished", lambda self, run, now, value=None: policies.Outcome())
    with pytest.raises(policies.LostError, match="never ended"):
        policies.scheduled(requests_at(5), FLEET, "auto")
