"""What the campaign sees of processes and threads: allocated bytes, times of starts, and errors beside a test."""

import subprocess
import threading
import time

import pytest
from campaign.allocated import allocated
from campaign.faults.observation import start_time
from waiting import in_threads

SIZE = 16 << 20
NOISE = SIZE // 8


def test_kept_bytes_count_whatever_their_pieces_are_and_freed_ones_do_not() -> None:
    before = allocated()
    kept: list[bytes] = [bytes(SIZE)]
    assert abs(allocated() - before - SIZE) < NOISE
    kept = [bytes(1 << 16) for _ in range(SIZE >> 16)]
    assert abs(allocated() - before - SIZE) < NOISE
    del kept
    assert allocated() - before < NOISE
    small = [bytes([n % 256, n // 256 % 256, n >> 16]) * 10 for n in range(100_000)]
    assert allocated() - before > len(small) * 60
    del small
    assert allocated() - before < NOISE


def test_bytes_of_another_thread_count() -> None:
    before, kept = allocated(), list[bytes]()
    thread = threading.Thread(target=lambda: kept.extend(bytes(1 << 16) for _ in range(SIZE >> 16)))
    thread.start()
    thread.join()
    assert abs(allocated() - before - SIZE) < NOISE


def test_the_start_of_a_process_is_known_to_the_tick() -> None:
    before = time.time()
    with subprocess.Popen(["sleep", "60"]) as process:
        after = time.time()
        try:
            assert before - 0.02 <= start_time(process.pid) <= after
        finally:
            process.kill()


def test_the_error_of_a_thread_is_raised_where_the_block_ends() -> None:
    stop, failed = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number:
            failed.set()
            raise ValueError("client 1")
        stop.wait()

    with pytest.raises(ValueError, match="client 1"), in_threads(work, 2, stop, 10):
        failed.wait()
