"""Real processes, killed with -9 at random points: nothing is read wrong, nothing fails, nothing is left.

100 hand-overs with 20 kills; ``make soak`` sets MMROUTER_SOAK=1000, which is kills, with ten hand-overs for each.
"""

import os
import random
import time

from handover.tests.shm.soak import FELL_BACK, READ, soak
from handover.tests.support import bytes_below
from mmrouter_handover.shm import ledger, reclaim
from mmrouter_handover.shm.files import clock

SOAK = "MMROUTER_SOAK"
KILLS = int(os.environ.get(SOAK, "20"))
HAND_OVERS = 10 * KILLS if SOAK in os.environ else 100
SEED = os.environ.get("MMROUTER_SOAK_SEED", "1")
LEFT_SECONDS = 5.0


def test_killed_writers_and_readers_fail_no_request_read_nothing_wrong_and_leave_no_byte(root):
    rnd = random.Random(SEED)

    def janitor(killed):
        if killed or rnd.random() < 0.1:
            reclaim(root, clock())

    with soak(root, SEED) as one:
        one.run(HAND_OVERS, KILLS, janitor)
        assert one.outcomes[READ] > HAND_OVERS // 2, one.outcomes
        assert one.outcomes[FELL_BACK] >= 1, one.outcomes
    assert nothing_is_left(root) < LEFT_SECONDS
    assert os.listdir(root) == []


def nothing_is_left(root):
    """Return after how many seconds the janitor had cleared the folder."""
    began = time.monotonic()
    while bytes_below(root):
        reclaim(root, clock())
        assert time.monotonic() - began < 4 * LEFT_SECONDS, ledger(root, clock())
        time.sleep(0.05)
    return time.monotonic() - began
