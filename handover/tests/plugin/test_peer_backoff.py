"""Who fails is left alone, longer each time, and whoever works again is as any other."""

from handover.tests.support import Clock
from mmrouter_handover.plugin.peer_backoff import FIRST_SECONDS, MAX_NAMES, MOST_SECONDS, Rest


def test_the_rest_doubles_up_to_a_bound_and_ends_with_the_first_success(clock: Clock):
    rest = Rest(clock)
    assert not rest.rests("a")
    for times in range(12):
        rest.failed("a")
        seconds = min(MOST_SECONDS, FIRST_SECONDS * 2**times)
        clock.now += seconds - 1
        assert rest.rests("a")
        clock.now += 1
        assert not rest.rests("a")
    rest.worked("a")
    rest.failed("a")
    clock.now += FIRST_SECONDS
    assert not rest.rests("a")


def test_names_are_forgotten_the_oldest_first(clock: Clock):
    rest = Rest(clock)
    for number in range(MAX_NAMES + 1):
        rest.failed(str(number))
    assert (rest.rests("0"), rest.rests("1")) == (False, True)
