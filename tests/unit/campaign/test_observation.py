"""Times of processes that the fault targets compare with those of requests."""

import subprocess
import time

from campaign.faults.observation import start_time


def test_the_start_of_a_process_is_known_to_the_tick() -> None:
    before = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        after = time.time()
        try:
            assert before - 0.02 <= start_time(process.pid) <= after
        finally:
            process.kill()
