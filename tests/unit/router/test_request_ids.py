"""Names of requests."""

import time

from ulid import ULID

from mmrouter_router.core.request_ids import RequestIds


def test_a_name_is_a_ulid_of_now_behind_its_routers_name():
    ids = RequestIds("r-1-")
    before = time.time_ns() // 1_000_000
    name = ids()
    assert name.startswith("r-1-")
    assert before <= ULID.from_str(name.removeprefix("r-1-")).milliseconds <= time.time_ns() // 1_000_000
    assert str(ULID.from_str(name.removeprefix("r-1-"))) == name.removeprefix("r-1-")


def test_no_name_comes_twice_however_many_are_asked_for():
    ids = RequestIds("")
    assert len({ids()[-16:] for _ in range(2000)}) == 2000
