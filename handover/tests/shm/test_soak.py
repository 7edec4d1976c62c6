"""Kill real processes with SIGKILL at random points of a hand-over: no wrong read, no failure, nothing left over.

100 hand-overs with 20 kills; ``make soak`` sets MMROUTER_SOAK=1000, the number of kills, with ten hand-overs each.
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


def test_killed_writers_and_readers_cause_no_failure_no_wrong_read_and_no_leak(root):
    rnd = random.Random(SEED)

    def janitor(killed):
        if killed or rnd.random() < 0.1:
            reclaim(root, clock())

    with soak(root, SEED) as session:
        session.run(HAND_OVERS, KILLS, janitor)
        assert session.outcomes[READ] > HAND_OVERS // 2, session.outcomes
        assert session.outcomes[FELL_BACK] >= 1, session.outcomes
    deadline = time.monotonic() + 60  # only ends a hang: leases of the dead last a second
    while bytes_below(root):
        reclaim(root, clock())
        assert time.monotonic() < deadline, ledger(root, clock())
        time.sleep(0.05)
    assert os.listdir(root) == []
