"""Threads of a test that act beside it."""

import threading

import pytest
from waiting import in_threads


def test_the_error_of_a_thread_is_raised_where_the_block_ends() -> None:
    stop, failed = threading.Event(), threading.Event()

    def work(number: int) -> None:
        if number:
            failed.set()
            raise ValueError("client 1")
        stop.wait()

    with pytest.raises(ValueError, match="client 1"), in_threads(work, 2, stop, 10):
        failed.wait()
