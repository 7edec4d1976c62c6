"""Allocated bytes: what is kept counts, in objects of any size and in other threads, and what is freed does not."""

import threading

from campaign.allocated import allocated

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
