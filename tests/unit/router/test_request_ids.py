"""Names of requests."""

import time

from ulid import ULID

from mmrouter_router.core.request_ids import RequestIds


def test_request_id_is_a_prefixed_ulid_of_now():
    ids = RequestIds("r-1-")
    before = time.time_ns() // 1_000_000
    name = ids()
    assert name.startswith("r-1-")
    assert before <= ULID.from_str(name.removeprefix("r-1-")).milliseconds <= time.time_ns() // 1_000_000
    assert str(ULID.from_str(name.removeprefix("r-1-"))) == name.removeprefix("r-1-")


def test_request_ids_are_unique():
    ids = RequestIds("")
    assert len({ids()[-16:] for _ in range(2000)}) == 2000
