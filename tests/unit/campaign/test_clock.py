"""The clock that the target ``faults`` sets: what is set, and what is computed from times that it gave."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from campaign.faults.clock import STEP_SECONDS, build, missing, set_clock, unstepped

READ = """
import sys, time
for line in sys.stdin:
    began = time.monotonic()
    time.sleep(0.01)
    print(time.time(), time.clock_gettime(time.CLOCK_TAI), began, time.monotonic(), flush=True)
"""


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_step_changes_the_wall_clock_of_one_container_only(tmp_path: Path) -> None:
    library, homes = build(tmp_path), [tmp_path / "victim", tmp_path / "other"]
    for home in homes:
        home.mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", READ],
            env={**os.environ, "HOME": str(home), "LD_PRELOAD": str(library)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for home in homes
    ]

    def clocks(process: "subprocess.Popen[str]") -> tuple[int, int, bool]:
        """Return by how many steps two wall clocks are off, and whether the monotonic clock and sleep are right."""
        assert process.stdin is not None
        assert process.stdout is not None
        before = time.monotonic()
        process.stdin.write("\n")
        process.stdin.flush()
        wall, atomic, began, ended = map(float, process.stdout.readline().split())
        off = [round((each - time.time()) / STEP_SECONDS) for each in (wall, atomic)]
        return off[0], off[1], before <= began < ended <= time.monotonic()

    try:
        assert [clocks(each) for each in processes] == [(0, 0, True)] * 2
        for steps in (-1, 1, 0):
            set_clock(homes[0], steps * STEP_SECONDS)
            assert [clocks(each) for each in processes] == [(steps, steps, True), (0, 0, True)]
    finally:
        for process in processes:
            process.communicate()


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_a_process_without_a_folder_keeps_its_clock(tmp_path: Path) -> None:
    env = {"LD_PRELOAD": str(build(tmp_path)), "HOME": str(tmp_path / "absent")}
    done = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env=env, capture_output=True, text=True, check=True
    )
    assert abs(float(done.stdout) - time.time()) < STEP_SECONDS / 2


@pytest.mark.parametrize("steps", [-1, 0, 1])
@pytest.mark.parametrize("age", [-1.0, 0.0, 130.0])
def test_the_time_of_a_recent_moment_is_found_from_a_clock_that_was_set(steps: int, age: float) -> None:
    now = 1_800_000_000.0
    assert unstepped(now - age + steps * STEP_SECONDS, now) == now - age
